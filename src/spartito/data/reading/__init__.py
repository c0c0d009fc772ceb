"""Reading: from an order of examples to the batches of one shard, ahead of their use."""
