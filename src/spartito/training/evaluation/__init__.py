"""Evaluation and prediction: figures over a data set, exact over all replicas."""
