"""Jobs of processes that the launcher starts itself: it watches them, and none outlives it."""
