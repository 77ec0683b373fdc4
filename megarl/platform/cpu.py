"""The platform of a machine without CUDA: tensors in main memory, Gloo between processes.
What megatron-core needs changed for it is in cpu_redirects.py."""

from __future__ import annotations

import resource
import sys
from typing import ClassVar

import psutil
import torch

from megarl.platform.base import Platform, thread_env

GIB = 1024**3


class CpuPlatform(Platform):
    """Processor cores, Gloo between processes."""

    name: ClassVar[str] = "cpu"
    collective_backend: ClassVar[str] = "gloo"

    def device(self, local_rank: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        """Nothing to choose: every process of the node works in the same main memory."""

    def synchronize(self) -> None:
        """Nothing to wait for: every CPU operation is done when its call returns."""

    def empty_cache(self) -> None:
        """Nothing to give back: `worker_env` tells glibc to keep freed blocks, on purpose."""

    def memory(self) -> dict[str, int]:
        """Return resident memory of the process; libraries and Python objects are included, unlike on CUDA."""
        ru_maxrss_bytes = 1 if sys.platform == "darwin" else 1024
        return {
            "allocated_bytes": psutil.Process().memory_info().rss,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * ru_maxrss_bytes,
            "total_bytes": psutil.virtual_memory().total,
        }

    def device_name(self) -> str | None:
        return None

    def start_memory_history(self) -> None:
        """Nothing to remember: torch's CPU allocator has no history."""

    def write_memory_history(self, path: str) -> bool:
        return False

    def worker_env(self, threads: int) -> dict[str, str]:
        return thread_env(threads) | {
            # glibc otherwise returns every large block to the kernel when a tensor dies and faults it in again, page by
            # page, at the next step.
            "MALLOC_MMAP_THRESHOLD_": str(4 * GIB),
            "MALLOC_TRIM_THRESHOLD_": str(64 * GIB),
            "MALLOC_TOP_PAD_": str(64 * 1024**2),
        }
