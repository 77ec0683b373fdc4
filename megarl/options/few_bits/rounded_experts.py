"""Quantisation-aware training of experts: their layers compute with weights as an engine that serves INT4 decodes them.

The weights themselves, their gradients and the optimizer's state stay as they are. Each rank rounds its own shard, on whose
borders groups of columns end (`WeightFormat.check_ranks`), by the quantiser of exports and weight updates.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from megarl.errors import ModelError
from megarl.options.few_bits.int4 import fake_quantised

_LAYER = re.compile(r"(.*\.)?mlp\.experts\.(local_experts\.\d+\.)?linear_fc[12]")
"""Names of experts that run one after another, and of those in one grouped module."""
_WEIGHT = re.compile(r"weight\d*")


def round_experts(chunk: torch.nn.Module, group: int) -> None:
    """Have the experts' layers of a chunk compute with weights rounded to INT4 in groups of `group` columns.

    Raises:
        ModelError: an expert's weights are not where a layer that is called has them.
    """
    rounded: set[int] = set()
    for name, layer in chunk.named_modules():
        if _LAYER.fullmatch(name):
            weights = [
                leaf for leaf, weight in layer.named_parameters(recurse=False) if _WEIGHT.fullmatch(leaf) and weight.dim() == 2
            ]
            rounded |= {id(layer.get_parameter(leaf)) for leaf in weights}
            rounding = _Rounding(layer, weights, group)
            layer.register_forward_pre_hook(rounding.begin)
            layer.register_forward_hook(rounding.end, always_call=True)
    for name, weight in chunk.named_parameters():
        if ".mlp.experts." in name and weight.dim() > 1 and id(weight) not in rounded:
            raise ModelError(f"model.int4_experts is {group}, but '{name}' is not the weight of an expert's own layer")


class _Rounding:
    """While a layer computes, the rounded weights are in the place of its own; recomputation calls the layer again."""

    def __init__(self, layer: torch.nn.Module, names: list[str], group: int) -> None:
        self.layer, self.names, self.group = layer, names, group
        self.own: dict[str, Any] = {}

    def begin(self, layer: torch.nn.Module, arguments: Any) -> None:
        for name in self.names:
            self.own[name] = weight = layer._parameters[name]
            assert isinstance(weight, Tensor)
            layer._parameters[name] = fake_quantised(weight, self.group)  # type: ignore[assignment]

    def end(self, layer: torch.nn.Module, arguments: Any, output: Any) -> None:
        for name, weight in self.own.items():
            layer._parameters[name] = weight
        self.own.clear()
