"""The coordinator: gives out work and notices who is lost."""
