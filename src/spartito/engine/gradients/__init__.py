"""Gradients: summed over replicas, whole or in fewer bits, after backward or beside it."""
