"""Sandboxes: a folder for each episode, and commands in it that reach nothing else."""

from megarl.options.sandboxes.sandbox import CommandResult, Sandbox, Sandboxes, open_sandboxes

__all__ = ["CommandResult", "Sandbox", "Sandboxes", "open_sandboxes"]
