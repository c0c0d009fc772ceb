"""A job for Kubernetes: what its rules allow, the job as a value, and its file."""
