"""Saving and resuming a run."""

from megarl.checkpoint.run_checkpoint import CheckpointFolder

__all__ = ["CheckpointFolder"]
