"""Tensors of other ranks on this machine, where they lie: what ranks on CPUs exchange is then read instead of sent."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import distributed

from megarl.platform.shared_memory import share, sharing_by_file

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _Block:
    group: Any
    of_ranks: Sequence[torch.UntypedStorage]
    """By rank of the group; one's own, too."""


_BLOCKS: dict[int, _Block] = {}  # by their address in this process


def open_to_peers(tensor: torch.Tensor, group: Any, owner: object) -> bool:
    """Let the ranks of `group` read each other's memory behind `tensor` as long as its `owner` lives; collective.

    All have the same, and call with the same part of it. Returns whether they can: not where they are on several machines, see
    different shared memory or have too little of it.
    """
    share([tensor])
    block = tensor.untyped_storage()
    gathered: list[Any] = [None] * group.size()
    distributed.all_gather_object(gathered, (BOOT_ID.read_text(), block.nbytes(), tensor.is_shared()), group=group)
    if not tensor.is_shared() or len(set(gathered)) > 1:
        return False
    with sharing_by_file():  # each that opens it gives back a reference of its own
        own_handles = [bytes(ForkingPickler.dumps(block)) if rank != group.rank() else None for rank in range(group.size())]
    distributed.all_gather_object(gathered, own_handles, group=group)
    try:
        blocks = [block if handles[group.rank()] is None else pickle.loads(handles[group.rank()]) for handles in gathered]
    except RuntimeError:  # no such file here
        blocks = []
    distributed.all_gather_object(gathered, bool(blocks), group=group)
    if not all(gathered):
        return False
    address = block.data_ptr()
    _BLOCKS[address] = _Block(group, blocks)
    finalize(owner, _BLOCKS.pop, address, None)
    return True


def of_peers(tensor: torch.Tensor, group: Any) -> list[torch.Tensor] | None:
    """The ranks' tensors that correspond to `tensor`, its own among them; None where they cannot be read."""
    block = _BLOCKS.get(tensor.untyped_storage().data_ptr())
    if block is None or block.group is not group:
        return None
    geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
    return [torch.empty(0, dtype=tensor.dtype).set_(storage, *geometry) for storage in block.of_ranks]
