"""What the tasks find of each other: who reaches whom, how fast, and what time it is there."""
