"""Checkpoints: whole directories of safetensors and JSON, the newest valid and the best."""

from spartito.checkpoint.manager import Best, CheckpointManager, read_checkpoint, write_checkpoint

__all__ = ["Best", "CheckpointManager", "read_checkpoint", "write_checkpoint"]
