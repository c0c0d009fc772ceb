"""The loops inside of fit: plain, of a chief that can be replaced, and one that outlives a loss."""
