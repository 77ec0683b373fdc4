"""Carries a weight map's rules out on tensors: a rank's shard from Hugging Face tensors, and these from all ranks' shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.weight_map import BoundRule, HFSlice

Item = TypeVar("Item")


def kept_dtype(rule: BoundRule) -> torch.dtype | None:
    """The dtype that the parameter keeps whatever the model's dtype is; None: nothing of its own."""
    return getattr(torch, rule.dtype) if rule.dtype else None


def gathered(items: Iterable[Item], limit_bytes: float, nbytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Lists of items, in order, of at most `limit_bytes` together; a larger item is a list of its own."""
    batch: list[Item] = []
    total = 0
    for item in items:
        if batch and total + nbytes(item) > limit_bytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes(item)
    if batch:
        yield batch


def shard_from_hf(
    rule: BoundRule, get: Callable[[str], Any], tp_rank: int, tp_size: int, padded_vocab: int | None = None
) -> Tensor:
    """The shard of `tp_rank`, reading no more than its slices.

    `get(name)` answers a Tensor or a safetensors slice. The result has the source's dtype and may be a view of a
    Tensor source: copy before writing into it.

    Raises:
        ModelError: a tensor does not have the shape that the config implies.
        LayoutError: `tp_size` does not divide the parameter.
    """
    axis = rule.tp_axis or 0
    pieces = rule.pieces(tp_rank, tp_size, padded_vocab)
    used = [name for name in rule.hf_names if any(piece.hf_name == name for piece in pieces)]
    sources = {name: _checked(rule, name, get(name)) for name in used or rule.hf_names[:1]}
    parts = [_cut(sources[piece.hf_name], axis, piece) for piece in pieces if piece.hf_name is not None]
    padding = sum(piece.stop - piece.start for piece in pieces if piece.hf_name is None)
    if padding:  # last, as the padded ids are
        row = parts[0] if parts else sources[rule.hf_names[0]][:1]
        parts.append(row.new_zeros((padding, *row.shape[1:])))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def hf_from_shards(rule: BoundRule, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The whole Hugging Face tensors from every TP rank's shard in TP order; the inverse of `shard_from_hf`.

    A parameter that is not split needs one shard and ignores others. Vocabulary padding is stripped. Tensors keep
    the shards' dtype and device, and are views where no copy is needed. A tied copy gives an empty list.

    Raises:
        ModelError: a shard does not have the shape that the config implies.
    """
    if rule.tied_copy:
        return []
    axis = rule.tp_axis or 0
    shards = shards[:1] if rule.tp_axis is None else shards
    padded = sum(shard.shape[axis] for shard in shards)
    _check_shards(rule, shards, padded)
    parts_by_name: dict[str, list[tuple[HFSlice, Tensor]]] = {name: [] for name in rule.hf_names}
    for rank, shard in enumerate(shards):
        offset = 0
        for piece in rule.pieces(rank, len(shards), padded):
            length = piece.stop - piece.start
            if piece.hf_name is not None:
                parts_by_name[piece.hf_name].append((piece, shard.narrow(axis, offset, length)))
            offset += length
    return [(name, _joined(parts, axis, rule.hf_shapes[name])) for name, parts in parts_by_name.items()]


def _checked(rule: BoundRule, name: str, source: Any) -> Any:
    shape = tuple(source.shape if isinstance(source, Tensor) else source.get_shape())
    expected = rule.hf_shapes[name]
    if shape != expected:
        raise ModelError(f"tensor '{name}' has shape {list(shape)}, but the model's config.json implies {list(expected)}")
    return source


def _check_shards(rule: BoundRule, shards: Sequence[Tensor], padded_vocab: int) -> None:
    for rank, shard in enumerate(shards):
        expected = rule.shape(len(shards), padded_vocab, rank)
        if tuple(shard.shape) != expected:
            raise ModelError(
                f"shard {rank} of {len(shards)} of '{rule.megatron_name}' has shape {list(shard.shape)}, "
                f"but the model's config.json implies {list(expected)}"
            )


def _cut(source: Any, axis: int, piece: HFSlice) -> Tensor:
    return source[piece.start : piece.stop] if axis == 0 else source[:, piece.start : piece.stop]


def _joined(parts: list[tuple[HFSlice, Tensor]], axis: int, shape: tuple[int, ...]) -> Tensor:
    if len(parts) == 1:
        return parts[0][1]
    whole = parts[0][1].new_empty(shape)
    for piece, tensor in parts:
        whole.narrow(axis, piece.start, piece.stop - piece.start).copy_(tensor)
    return whole
