"""Start the tasks of a job as actors of a Ray cluster."""
