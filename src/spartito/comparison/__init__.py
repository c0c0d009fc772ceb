"""One job under several strategies, one after the other: what runs, and what came of it."""
