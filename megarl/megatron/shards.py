"""The part of a checkpoint that this rank contributes: boxes of global tensors, objects, and the state that all ranks share.

Every byte is contributed once. Of what is trained, a data-parallel replica contributes the slices that its optimizer owns,
so that all ranks write and none gathers; a slice of a flat tensor is at most a few boxes of the tensor.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megarl import platform
from megarl.megatron.host_memory import HostMemory

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ShardBox:
    """Box `sizes` from `offsets` on of the tensor `key` of `global_shape`; its values are the flat `data`.

    In a copy that lies in several blocks of memory `data` are the first values, and `rest` those that follow.
    `padded_axis`: along it a stored tensor may have more or less padding, as the vocabulary has under another layout.
    """

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Tensor
    padded_axis: int | None = None
    rest: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Shards:
    """A rank's part of a role's checkpoint. `objects` are `torch.save`d; `common` is None but on rank 0.

    `absent`: by key how many elements of a tensor nobody has, since what is frozen has no optimizer state.
    """

    rank: int
    boxes: list[ShardBox]
    objects: dict[str, bytes]
    common: dict[str, Any] | None
    absent: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that a copy needs."""
        return sum(map(_aligned, self.boxes))

    def copied_into(self, memory: HostMemory) -> Shards:
        """A copy in `memory` from `host_memory`, which training does not change."""
        memory.rewind()
        boxes = []
        for box in self.boxes:
            first, *rest = (part.view(box.data.dtype) for part in memory.take(box.data.nbytes))
            parts = (first, *rest)
            for part, values in zip(parts, box.data.split([len(part) for part in parts]), strict=True):
                part.copy_(values, non_blocking=True)
            boxes.append(replace(box, data=first, rest=tuple(rest)))
            memory.take(_aligned(box) - box.data.nbytes)
        if platform.cuda_present():
            platform.current().synchronize()
        return replace(self, boxes=boxes)


def host_memory(nbytes: int) -> HostMemory:
    """So much main memory, pinned where there is a device that copies into it."""
    return HostMemory(nbytes, "cuda" if platform.cuda_present() else "cpu")


NOTHING_ABSENT: Mapping[str, int] = {}


def shards_of(state: dict[str, Any], owned: Sequence[ShardBox], absent: Mapping[str, int] = NOTHING_ABSENT) -> Shards:
    """This rank's part of a sharded state of megatron-core's, and `owned` besides, which the state must not hold."""
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    boxes, objects = list(owned), {}
    for entry in nested_values(sharded):
        if not is_main_replica(entry.replica_id):
            continue
        if isinstance(entry, ShardedObject):
            content = io.BytesIO()
            torch.save([entry.data], content)
            objects[entry.unique_key] = content.getvalue()
        else:
            boxes += boxes_of(entry, plain(entry.data).reshape(-1), 0)
    rank = torch.distributed.get_rank()
    return Shards(rank, boxes, objects, common if rank == 0 else None, absent)


def boxes_of(sharded: ShardedTensor | ShardedTensorFactory, data: Tensor, start: int) -> Iterator[ShardBox]:
    """The boxes of a sharded tensor whose elements from the flat index `start` on are `data`."""
    for part, first in _parts(sharded):
        numel = prod(part.local_shape)
        low, high = max(start, first), min(start + data.numel(), first + numel)
        at = low - start
        for offsets, sizes in flat_boxes(tuple(part.local_shape), low - first, high - first):
            depth = part.prepend_axis_num
            global_offsets = (
                *part.global_offset[:depth],
                *(a + b for a, b in zip(part.global_offset[depth:], offsets, strict=True)),
            )
            values = data[at : at + prod(sizes)]
            shape, padded_axis = tuple(part.global_shape), 0 if part.allow_shape_mismatch else None
            yield ShardBox(part.key, shape, global_offsets, (*(1,) * depth, *sizes), values, padded_axis)
            at += prod(sizes)


def flat_boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements `start` to `end` of a flat tensor of `shape` as (offsets, sizes) of boxes, in order of their elements."""
    if end <= start:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), end // row  # rows from `first` up to `last` are whole
    if first > last:  # all of it is within one row
        for offsets, sizes in flat_boxes(shape[1:], start - last * row, end - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    for offsets, sizes in flat_boxes(shape[1:], start - (first - 1) * row, row if start < first * row else 0):
        yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    for offsets, sizes in flat_boxes(shape[1:], 0, end - last * row):
        yield (last, *offsets), (1, *sizes)


def plain(tensor: Tensor) -> Tensor:
    """The values of a tensor, also of one that Transformer Engine holds in FP8."""
    return (tensor.dequantize() if is_float8tensor(tensor) else tensor).detach()


def is_tensor(entry: object) -> bool:
    """Return whether an entry of a sharded state is stored as a tensor, or as several."""
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def objects_of(state: dict[str, Any]) -> dict[str, Any]:
    """The entries of a sharded state that are no tensors."""
    return {name: entry for name, entry in state.items() if not is_tensor(entry)}


def _aligned(box: ShardBox) -> int:
    return box.data.nbytes + -box.data.nbytes % _ALIGNMENT


def elements_of(sharded: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[str, int]]:
    """(key, number of elements here) of every tensor that one is stored as."""
    for part, _ in _parts(sharded):
        yield part.key, prod(part.local_shape)


def _parts(sharded: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """The tensors that one is stored as, such as gate and up of a gated MLP, and each one's first element in the flat one."""
    if isinstance(sharded, ShardedTensor):
        yield sharded, 0
        return
    whole = torch.empty(sharded.data.shape, dtype=sharded.data.dtype, device="meta")
    for part in nested_values(replace(sharded, data=whole).build()):
        if part.data._base is not whole or not part.data.is_contiguous():
            raise NotImplementedError(f"'{part.key}' is stored as something else than slices of the parameter")
        yield part, part.data.storage_offset()
