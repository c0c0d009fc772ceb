"""Outer loops: groups of replicas that train apart, and the outer steps that merge them."""
