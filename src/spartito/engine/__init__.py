"""What two or more strategies share: losses, gradients, BatchNorm, randomness, precision."""
