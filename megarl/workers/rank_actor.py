"""A training rank as a Ray actor: it ends with the node's Ray, and what it writes is in the run folder."""

from __future__ import annotations

import os
from typing import Any

import ray

from megarl.config.layout import Layout
from megarl.workers.fate import end_with_parent, keep_last_words
from megarl.workers.rank import Rank


class RankProcess(Rank):
    """`Rank` in a process of its own. Its output goes to `<log_folder>/<name>-<rank>.log`."""

    def __init__(self, log_folder: str, name: str, rank: int, layout: Layout, threads: int) -> None:
        end_with_parent()
        keep_last_words(f"{log_folder}/{name}-{rank}.log")
        super().__init__(name, rank, layout, threads)

    def whereabouts(self) -> tuple[str, int]:
        """(IP of this node, this process's id)."""
        return ray.util.get_node_ip_address(), os.getpid()


# Ray's decorator gives classes methods that their types do not show.
RankActor: Any = ray.remote(concurrency_groups={"control": 1})(RankProcess)
