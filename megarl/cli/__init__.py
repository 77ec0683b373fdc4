"""The `megarl` command: it parses argv and prints; the other rooms do the work."""

from megarl.cli.commands import main

__all__ = ["main"]
