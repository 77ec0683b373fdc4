"""Sandboxes: a folder for each episode, and commands in it that reach nothing else."""
