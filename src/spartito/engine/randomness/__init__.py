"""Random numbers: those of the global batch, however it is split."""
