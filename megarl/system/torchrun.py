"""Whether torchrun started this process, from its environment alone: nothing heavy is imported to know it."""

from __future__ import annotations

import os


def is_torchrun() -> bool:
    """Return whether this process was started by torchrun (or by something that sets the same variables)."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_leader() -> bool:
    """Return whether this process writes the run's files: a driver under Ray, rank 0 under torchrun."""
    return not is_torchrun() or os.environ["RANK"] == "0"
