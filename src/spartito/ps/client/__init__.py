"""A task and its connections to the servers and the coordinator."""
