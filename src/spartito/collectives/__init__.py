"""Collective communication: sums, broadcasts and barriers over shared memory, sockets or torch."""
