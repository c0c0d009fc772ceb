"""What a task does of each step, by strategy."""
