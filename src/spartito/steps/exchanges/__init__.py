"""Exchanges: how gradients become an update."""
