"""A function as the program of a job: the call as bytes, the task, what came of it."""
