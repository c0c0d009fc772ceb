"""Data sets that have a name or a form of their own: fetched, and read from their files."""
