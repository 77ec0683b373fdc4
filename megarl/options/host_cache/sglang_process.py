"""Parts that SGLang's servers (0.5.23) lack for a cache in main memory on a CPU, installed in each of a server's processes.

There it copies from main memory to main memory, which serves tests: SGLang's kernels for it are those of GPUs, and torch's
stream of a CPU, which does at once whatever it is given, cannot be waited for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

ON_CPU = ("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first")
"""Arguments with which one function copies."""
RESERVE_BYTES = 1 << 30
"""Main memory that is left to others, in place of 10 GiB: little on a machine with GPUs, and half of a small one."""


def install(arguments: list[str]) -> None:
    """Let a server on a CPU copy, if it has such a cache; its `arguments` get those with which it can."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or "--enable-hierarchical-cache" not in arguments:
        return
    arguments += ON_CPU
    from sglang.srt.mem_cache.pool_host import base, mha

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
    mha.transfer_kv_direct = copy_rows
    torch.cpu.Stream.synchronize = lambda stream: None  # type: ignore[attr-defined]


def copy_rows(
    *, src_layers: Sequence[Tensor], dst_layers: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Copy rows `src_indices` `[N]` of each tensor to rows `dst_indices` of the one at its place: pages of `page_size`."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
