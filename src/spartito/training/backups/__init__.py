"""Backups of a fit: where they lie, when one is due, and which training they are of."""
