"""Updates: which optimizers are accepted, and how replicas make their steps or divide them."""
