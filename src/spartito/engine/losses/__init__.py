"""Losses: what a batch costs, in any form that users write, as a sum and a weight."""
