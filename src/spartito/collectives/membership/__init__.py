"""How the tasks of a job find each other, who lives, and who goes on after a loss."""
