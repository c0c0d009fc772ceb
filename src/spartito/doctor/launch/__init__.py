"""Starts a doctor where each task of a job would run: here, in containers, on hosts."""
