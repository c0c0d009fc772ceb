"""A parameter server: holds a shard of the model and updates it."""
