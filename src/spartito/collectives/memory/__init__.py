"""A group of tasks on one machine: sums in memory that all have mapped."""
