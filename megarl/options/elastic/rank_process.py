"""Work of a rank's process when other ranks are replaced: it leaves its world, and becomes a rank of a new one."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.layout import Layout
from megarl.system.process_exit import log_to_file
from megarl.workers.own_gpu import own_gpu
from megarl.workers.rank_actor import start_rank

if TYPE_CHECKING:
    from megarl.workers.rank_actor import RankProcess


def leave(process: RankProcess) -> None:
    """Let go of models and process groups. Ranks that wait for this one in a collective fail then, and leave, too."""
    import torch.distributed
    from megatron.core import parallel_state

    from megarl import platform

    process.rank = None  # type: ignore[assignment]
    gc.collect()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    platform.current().empty_cache()


@dataclass(frozen=True)
class Become:
    """Have a process be rank `rank` of the group `name`, whose world is yet to be connected."""

    log_folder: str
    name: str
    rank: int
    layout: Layout
    threads: int

    def __call__(self, process: RankProcess) -> None:
        """Do so in the process."""
        log_to_file(f"{self.log_folder}/{self.name}-{self.rank}.log")
        process.name, process.number = self.name, self.rank
        process.rank = start_rank(self.name, self.rank, self.layout, self.threads, own_gpu() or 0)
