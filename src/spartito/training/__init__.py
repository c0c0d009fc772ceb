"""`fit`, `evaluate` and `predict` for every strategy; callbacks, metrics, the evaluator."""
