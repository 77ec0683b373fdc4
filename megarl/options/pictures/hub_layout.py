"""A tower whose layers hold queries, keys and values as the hub stores them: in one matrix, its rows in the hub's order.

Next to each other are there the two dimensions of a head that rotate together; transformers' module has them half a head apart,
and a matrix for each of the three. Weights, gradients and updates are then those of the hub's tensors, and what the module
computes stays the same: the features of queries and keys are put in its order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megarl.models.vision import Vision
from megarl.options.pictures.hearing import Hearing
from megarl.options.pictures.sounds import hear_each_alone

PARTS = ("q_proj", "k_proj", "v_proj")


def hold_as_on_the_hub(model: torch.nn.Module, vision: Vision) -> None:
    """Give every layer of the tower in `model`, or that it is, one matrix `vision.qkv` with the values of its three."""
    if isinstance(vision, Hearing) and hasattr(model, "audio_tower"):
        hear_each_alone(model)
        model.visual = torch.nn.Module()  # nothing is shown to it, and no update has its weights
    if vision.qkv is None:
        return
    for tower in [module for module in model.modules() if type(module).__name__ == vision.tower]:
        for layer in tower.layers:  # type: ignore[union-attr]
            _fuse(layer.attn, vision.qkv, vision.heads)


def _fuse(attention: Any, name: str, heads: int) -> None:
    linears = [getattr(attention, part) for part in PARTS]
    first = linears[0]
    device, dtype = first.weight.device, first.weight.dtype
    whole = torch.nn.utils.skip_init(torch.nn.Linear, first.in_features, 3 * first.out_features, device=device, dtype=dtype)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            query, key, value = (getattr(linear, kind) for linear in linears)
            rows = [query.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)]
            rows += [key.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2), value]
            getattr(whole, kind).copy_(torch.cat(rows)).requires_grad_(query.requires_grad)
    for number, part in enumerate(PARTS):
        setattr(attention, part, _Part(whole, number, heads if part != "v_proj" else None))
    setattr(attention, name, whole)


class _Part(torch.nn.Module):
    """A third of a linear layer, which has the parameters; the features of each of `heads` are put in transformers' order."""

    def __init__(self, whole: torch.nn.Linear, number: int, heads: int | None) -> None:
        super().__init__()
        self._whole = (whole,)  # no module of this one: its parameters have one name
        self._number, self._heads = number, heads

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., H]` → `[..., H]`."""
        [whole] = self._whole
        weight, bias = whole.weight.chunk(3)[self._number], whole.bias.chunk(3)[self._number]
        features = functional.linear(hidden, weight, bias)
        if self._heads is None:
            return features
        return features.unflatten(-1, (self._heads, -1, 2)).transpose(-1, -2).flatten(-3)
