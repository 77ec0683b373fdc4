"""Kernels that give the same bits again: what torch, cuBLAS, NCCL and Transformer Engine must be told (docs/checkpoints.md)."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Read when the first handle, communicator or attention is made; what the user set himself stays."""


def make_deterministic() -> None:
    """Choose such kernels in this process; call before its first work on a device.

    An operation of torch that has no such kernel raises RuntimeError from here on.
    """
    import torch

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, and nobody reads it
    torch.backends.cudnn.benchmark = False
