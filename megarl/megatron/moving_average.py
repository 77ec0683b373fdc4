"""Weights that follow those of another role by an exponential moving average, in float32 precision.

A bfloat16 weight has 8 significant bits, so of a small step towards another weight nothing would be left. Beside each such
weight stand the 16 bits that float32 has more, its remainder: together they are the average, the weight is the average rounded.
Weights in float32 need none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megarl.megatron.box_reader import BoxReader
from megarl.megatron.shards import boxes_of, is_tensor

REMAINDER = "remainder."
"""Beginning of the keys of remainders in a checkpoint."""


def split_float32(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 → (bfloat16 of the same shape, rounded to nearest; int16, what the rounding left out, in float32's last bit).

    A value halfway between two bfloat16 numbers is rounded away from 0. Values must be finite.
    """
    bits = values.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def joined_float32(weights: Tensor, remainder: Tensor) -> Tensor:
    """The float32 values that `split_float32` took apart, bit for bit."""
    upper = weights.contiguous().view(torch.int16).to(torch.int32) << 16
    return (upper + remainder.to(torch.int32)).view(torch.float32)


class MovingAverage:
    """The remainders of a role's bfloat16 weights: 2 bytes a weight, from the first step on; before, none."""

    def __init__(self) -> None:
        self.remainders: dict[str, Tensor] = {}
        """By name of the weight int16, of its shape."""

    @torch.no_grad()
    def follow(self, weights: Iterable[tuple[str, Tensor]], others: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Each weight ← share·other + (1 − share)·weight, in float32, one weight after the other.

        `weights` and `others` are pairs of name and tensor of the same model and layout; `share` is above 0 and at most 1.
        """
        for (name, weight), (_, other) in zip(weights, others, strict=True):
            if weight.dtype != torch.bfloat16:
                weight.lerp_(other.to(weight.dtype), share)
                continue
            if name not in self.remainders:
                self.remainders[name] = torch.zeros_like(weight, dtype=torch.int16)
            remainder = self.remainders[name]
            rounded, left = split_float32(joined_float32(weight, remainder).lerp(other.float(), share))
            weight.copy_(rounded)
            remainder.copy_(left)

    def load(self, reader: BoxReader, weights: Iterable[tuple[str, Tensor]], models: Mapping[str, dict[str, Any]]) -> None:
        """Read the remainders of a checkpoint of these weights, whose sharded states are `models`; it may have none."""
        self.remainders = {}
        if not reader.has(REMAINDER):
            return
        named = list(weights)
        self.remainders = {name: torch.zeros_like(w, dtype=torch.int16) for name, w in named if w.dtype == torch.bfloat16}
        state = self.sharded_state(named, models)
        reader.read(box for entry in state.values() for box in boxes_of(entry, entry.data.view(-1), 0))

    def sharded_state(self, weights: Iterable[tuple[str, Tensor]], models: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The remainders as a sharded state, cut as the weights are in `models`, the sharded states of the model's chunks."""
        of_memory = {w.data_ptr(): self.remainders[name] for name, w in weights if name in self.remainders}
        sharded = {
            f"{model}.{name}": _in_place_of(entry, of_memory[entry.data.data_ptr()])
            for model, name, entry in _tensors(models)
            if entry.data.data_ptr() in of_memory
        }
        assert len(sharded) >= len(self.remainders), "every weight has a place of its own in the sharded states"
        return sharded


def _tensors(models: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for model, state in models.items():
        yield from ((model, name, entry) for name, entry in state.items() if is_tensor(entry))


def _in_place_of(entry: Any, remainder: Tensor) -> Any:
    """The sharded tensor `entry`, of a weight, with the remainder as its values and a key of its own."""
    changes: dict[str, Any] = {"key": f"{REMAINDER}{entry.key}", "data": remainder.view(entry.data.shape)}
    return replace(entry, **changes, **({"dtype": remainder.dtype} if isinstance(entry, ShardedTensor) else {}))
