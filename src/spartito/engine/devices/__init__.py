"""Devices: where a process computes, in which precision and memory, and what it reads back."""
