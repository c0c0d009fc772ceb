"""What a training leaves: checkpoints, its run folder, weights; and who may write where."""
