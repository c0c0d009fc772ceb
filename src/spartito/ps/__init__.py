"""Parameter servers: tasks that keep the parameters, each a part, and apply what workers push."""
