"""The GPU that Ray gave this process. Every GPU of a cluster imports this for a moment, so it imports little.

Every process of a run on GPUs sees all GPUs of its node and is told which is its own: tensors that one process shares with
another by CUDA IPC can be opened only by a process that sees the GPU they are on.
"""

from __future__ import annotations

import os

import ray

from megarl.errors import ClusterError

SEES_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Keeps Ray from narrowing `CUDA_VISIBLE_DEVICES` to the GPUs that it gives a process; what the node's Ray sees stays."""


def own_gpu() -> int | None:
    """The number of the GPU that Ray gave this process, among those that it sees; None if it gave none."""
    gpu_ids = ray.get_gpu_ids()
    return gpu_number(gpu_ids[0], os.environ.get("CUDA_VISIBLE_DEVICES")) if gpu_ids else None


def gpu_number(gpu: int | str, visible: str | None) -> int:
    """The number by which CUDA knows what Ray calls `gpu`, in a process whose `CUDA_VISIBLE_DEVICES` is `visible`.

    Raises:
        ClusterError: `gpu` is not among those that are visible.
    """
    if visible is None:
        return int(gpu)
    names = [name.strip() for name in visible.split(",")]
    if str(gpu) not in names:
        raise ClusterError(
            f"Ray gave GPU {gpu}, which is not among CUDA_VISIBLE_DEVICES='{visible}'; start Ray with the same "
            "CUDA_VISIBLE_DEVICES on the whole node, or without"
        )
    return names.index(str(gpu))
