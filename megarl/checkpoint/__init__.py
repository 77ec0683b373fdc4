"""Checkpoints on disk: megatron-core's format (`format`), and files that ranks write to it in the background."""
