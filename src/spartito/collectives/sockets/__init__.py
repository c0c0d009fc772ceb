"""A group of tasks by connections between each two of them."""
