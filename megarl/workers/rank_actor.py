"""A training rank as a Ray actor: it ends with the node's Ray, and what it writes is in the run folder."""

from __future__ import annotations

import faulthandler
import os
from typing import TYPE_CHECKING, Any

import ray

from megarl import platform
from megarl.config.layout import Layout
from megarl.models.registry import use_architecture
from megarl.system.hidden_imports import hidden
from megarl.system.process_exit import end_with_parent, log_to_file
from megarl.workers.own_gpu import own_gpu

if TYPE_CHECKING:
    from megarl.workers.rank import Rank


class RankProcess:
    """The process of a `Rank`. Its output goes to `<log_folder>/<name>-<rank>.log`."""

    def __init__(
        self, log_folder: str, name: str, rank: int, layout: Layout, threads: int, architecture: str | None = None
    ) -> None:
        end_with_parent()
        log_to_file(f"{log_folder}/{name}-{rank}.log")
        self.name, self.number = name, rank
        self.rank = start_rank(name, rank, layout, threads, own_gpu() or 0)
        use_architecture(architecture)

    def host_and_pid(self) -> tuple[str, int]:
        """(IP of this node, this process's id)."""
        return ray.util.get_node_ip_address(), os.getpid()

    def address(self) -> tuple[str, int]:
        """The address at which rank 0 may lead the world's rendezvous."""
        from megarl.workers.rank import free_address

        return free_address()

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of `RankCalls`, by its name; what it raises reaches the driver as it is."""
        return getattr(self.rank, method)(*arguments)

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, int]:
        """See `Rank.progress`; for a look while it is busy."""
        return self.rank.progress()

    @ray.method(concurrency_group="control")
    def dump_stacks(self, folder: str) -> str:
        """Write this process's Python stacks beside the run's files, while another method is stuck; returns the file."""
        return write_stacks(folder, self.name, self.number)


def start_rank(name: str, rank: int, layout: Layout, threads: int, gpu: int = 0) -> Rank:
    """The rank of this process, on the `gpu`-th GPU that it sees, if it sees any.

    The platform is installed first: the modules that a rank imports import megatron.
    """
    here = platform.install()
    with hidden("wandb", "torch.utils.tensorboard"):  # megatron-core imports them where it can, a fifth of a rank's start
        from megarl.workers.rank import Rank

    return Rank(name, rank, layout, threads, here, gpu)


def write_stacks(folder: str, name: str, rank: int) -> str:
    """Write the Python stacks of all threads of this process as `<folder>/<name>-<rank>.txt`; returns the file."""
    path = os.path.join(folder, f"{name}-{rank}.txt")
    with open(path, "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    return path


# Ray's decorator gives classes methods that their types do not show.
RankActor: Any = ray.remote(concurrency_groups={"control": 1})(RankProcess)
