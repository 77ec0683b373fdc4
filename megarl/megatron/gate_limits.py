"""Limits of what an MLP's or an expert's gate and up projection give (Step 3.5), set on any layer spec's linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarl.errors import LayoutError
from megarl.models.architecture import GateLimits


def clamp_gates(chunk: torch.nn.Module, limits: Sequence[GateLimits]) -> None:
    """Clamp the gates and up projections of each layer in `chunk` as its entry in `limits` says; empty: nothing is clamped.

    SiLU of the gate is to be at most L. It grows where it is above 0, so that is SiLU of a gate that is at most the place at
    which SiLU is L: clamped before it, whatever kernel computes the rest.

    Raises:
        LayoutError: experts have no linear layer of their own.
    """
    for layer in (module for module in chunk.modules() if isinstance(module, TransformerLayer)) if limits else ():
        of_layer, mlp = limits[layer.layer_number - 1], layer.mlp
        experts: Any = getattr(mlp, "experts", None)
        _clamp([mlp if experts is None else mlp.shared_experts], of_layer.mlp)
        if experts is not None:
            _clamp(getattr(experts, "local_experts", [experts]), of_layer.experts)


def _clamp(mlps: Sequence[Any], limit: float) -> None:
    for mlp in mlps if limit < math.inf else ():
        if not hasattr(mlp, "linear_fc1"):
            raise LayoutError(
                f"this model clamps what its experts compute, which {type(mlp).__name__} has no layer for; "
                "moe_use_legacy_grouped_gemm and use_transformer_engine_op_fuser must be left out"
            )
        mlp.linear_fc1.register_forward_hook(_clamping(limit))


def _clamping(limit: float) -> Any:
    gate_limit = silu_inverse(limit)

    def clamp(_: Any, inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        gate, up = output[0].chunk(2, dim=-1)
        return torch.cat([gate.clamp(max=gate_limit), up.clamp(-limit, limit)], dim=-1), output[1]

    return clamp


def silu_inverse(value: float) -> float:
    """The x above 0 for which x / (1 + exp(-x)) is `value`, which is above 0."""
    x = value + 1.0
    for _ in range(64):  # Newton's method, from above, where SiLU is all but straight
        share = 1 / (1 + math.exp(-x))
        x -= (x * share - value) / (share * (1 + x * (1 - share)))
    return x
