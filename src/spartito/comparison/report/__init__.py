"""Reads the record of a comparison, and says and draws what it comes to."""
