"""Placements: where a model's tensors lie, and how a task computes a batch with them."""
