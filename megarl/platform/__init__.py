"""The room that knows which machine this is: NVIDIA GPUs under NCCL, or processor cores under Gloo.
`install()` comes before the first import of megatron; it is the only thing a process needs to do to train on a CPU."""

from __future__ import annotations

import os
import sys
from typing import Literal

from megarl.platform.base import Platform

__all__ = ["REHEARSAL", "Platform", "cuda_present", "current", "detect", "install", "named", "of_cluster"]

REHEARSAL = "MEGARL_REHEARSAL"
"""Set in the environment of all processes of a rehearsal (`launch/rehearse.py`): they work on the CPU, whatever is there."""

_installed: Platform | None = None


def cuda_present() -> bool:
    """Say whether this process has a usable CUDA device. Tests replace this function to simulate the other machine."""
    import torch

    return torch.cuda.is_available()


def detect() -> Platform:
    """Return this machine's platform without making this process ready for megatron."""
    return named("cuda" if REHEARSAL not in os.environ and cuda_present() else "cpu")


def of_cluster(*, have_gpus: bool) -> Platform:
    """The platform of the processes of a cluster whose nodes have GPUs, or none; in a rehearsal they only say so."""
    return named("cuda" if have_gpus and REHEARSAL not in os.environ else "cpu")


def named(name: Literal["cpu", "cuda"]) -> Platform:
    """Return a platform by its name: for a driver, which only starts processes, perhaps on other machines than its own."""
    if name == "cuda":
        from megarl.platform.cuda import CudaPlatform

        return CudaPlatform()
    from megarl.platform.cpu import CpuPlatform

    return CpuPlatform()


def install() -> Platform:
    """Choose the platform of this process once and make it ready; later calls return the same object.

    With CUDA present nothing in torch or megatron is touched; what CUDA's libraries read from the environment is set, where it
    is not (ranks that Ray starts are given it). Without CUDA, the redirects of `cpu_redirects` let unpatched
    megatron-core run on the CPU under Gloo; they live in this process alone.

    Raises:
        RuntimeError: megatron was imported before the first call on a machine without CUDA. Megatron copies references
            to torch's functions as it is imported, so redirects made later would be half in force.
    """
    global _installed
    if _installed is not None:
        return _installed
    platform = detect()
    if platform.name == "cpu":
        if "megatron.core" in sys.modules:
            raise RuntimeError(
                "megarl.platform.install() was called after megatron.core was imported; on a machine without CUDA call it "
                "before the first import of megatron"
            )
        from megarl.platform.cpu_redirects import apply_redirects

        apply_redirects()
    else:
        from megarl.platform.cuda import ENVIRONMENT

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    _installed = platform
    return _installed


def current() -> Platform:
    """Return the platform of this process, installing it if nobody has yet (same conditions as `install`)."""
    return install()
