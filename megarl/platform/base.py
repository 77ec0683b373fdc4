"""Answers of every platform. The rest of megarl asks these questions and never names torch.cuda.
A platform holds no state of its own: two objects of the same class behave alike."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy
import torch


class Platform(ABC):
    """The device, its collectives, its memory and its random numbers, for one process."""

    name: ClassVar[str]
    """`"cpu"` or `"cuda"`."""

    collective_backend: ClassVar[str]
    """The backend for `torch.distributed.init_process_group`: `"gloo"` or `"nccl"`."""

    collective_timeout_s: ClassVar[float] = 0.0
    """The least time after which a collective counts as hanging. NCCL's watchdog ends the process then, and ranks wait in one
    while another writes a model of hundreds of gigabytes."""

    @abstractmethod
    def device(self, local_rank: int = 0) -> torch.device:
        """Return the device of the process that is number `local_rank` on its node."""

    @abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Make `device(local_rank)` the default device of this process."""

    def bind_to_device(self, local_rank: int) -> frozenset[int]:
        """Keep this process to the cores that are nearest to `device(local_rank)`; returns them, none if all are alike."""
        return frozenset()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached, unused device memory back."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Return `allocated_bytes`, `peak_bytes` and `total_bytes` of the memory that tensors of this process live in."""

    @abstractmethod
    def device_name(self) -> str | None:
        """Return what the driver calls this process's GPU, such as `NVIDIA H200`; None without one."""

    @abstractmethod
    def start_memory_history(self) -> None:
        """Remember from now on every allocation on the device and where in the code it was made."""

    @abstractmethod
    def write_memory_history(self, path: str) -> bool:
        """Write what was remembered to `path`, and stop; False, and no file, where the platform has no history."""

    @abstractmethod
    def worker_env(self, threads: int) -> dict[str, str]:
        """Return the environment variables a worker process must be started with.

        Args:
            threads: OpenMP threads of the worker, at least 1.

        Raises:
            ValueError: `threads` is below 1.
        """

    def seed(self, seed: int) -> None:
        """Seed Python, NumPy and torch (every device). Megatron's per-rank RNG tracker is seeded where the model is built."""
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def thread_env(threads: int) -> dict[str, str]:
    """Return the variables that give a process `threads` OpenMP threads which sleep while they wait.

    Threads that spin while idle take the cores from the process that has work, which is fatal where workers share cores.
    OMP_WAIT_POLICY is the standard's name, GOMP_SPINCOUNT is GNU's (the one PyPI's torch links) and KMP_BLOCKTIME Intel's.
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }
