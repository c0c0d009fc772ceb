"""A user's modules: BatchNorm and buffers over all replicas, and what passes show and leave."""
