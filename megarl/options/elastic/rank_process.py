"""Work of a rank's process when other ranks are replaced: it leaves its world, and becomes a rank of a new one."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from megarl.config.layout import Layout
from megarl.system.process_exit import log_to_file
from megarl.workers.own_gpu import own_gpu
from megarl.workers.rank_actor import RankProcess, start_rank

if TYPE_CHECKING:
    from collections.abc import Iterator


class CutShort(BaseException):
    """The world of this rank is lost, and what it computes is of no use."""


def interrupt(process: RankProcess) -> None:
    """End what another thread of this process computes as its rank, at its next step in Python, and what waits for others.

    A loss is seen in collectives alone, and a forward and backward pass may take long to come to one.
    """
    import torch.distributed

    if process.rank is None:  # it has left already: on a busy machine this may come behind `leave`
        return
    if process.rank.platform.name == "cuda" and torch.distributed.is_initialized():
        torch.distributed.distributed_c10d._abort_process_group()  # NCCL's do not see that a process is gone
    for thread, frame in sys._current_frames().items():
        if any(of_thread.f_code is RankProcess.call.__code__ for of_thread in _outwards(frame)):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(CutShort))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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
