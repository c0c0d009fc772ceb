"""A job for the tools that rent machines: what they allow, the job as a value, and its file."""
