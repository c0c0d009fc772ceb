"""What a task knows about its machine and its network before it meets the others."""
