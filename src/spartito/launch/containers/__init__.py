"""A job in containers: its file, the container engine, and the job as it runs."""
