"""How replicas talk: sums, broadcasts and barriers over shared memory, sockets or torch."""
