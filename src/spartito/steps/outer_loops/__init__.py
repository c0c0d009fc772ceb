"""Outer loops: when and how groups agree that train apart, and the state of each."""
