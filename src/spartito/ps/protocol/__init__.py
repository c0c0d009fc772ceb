"""What tasks of a job with parameter servers say to each other, and how it travels."""
