"""Gradients, optimizer state and parameters of which each replica keeps a shard.

ZeRO (Rajbhandari et al. 2020) in its three stages: blocks of a model (`blocks`) lie flat, cut
evenly among the replicas (`homes`), and travel between them in rounds (`stage`).
"""
