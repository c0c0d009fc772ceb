"""Jobs for Slurm: what is asked for, the batch file, and what Slurm says of it."""
