"""Layer specs by name: `transformer_engine`, megatron-core's own `local`, and `reference` (plain torch, any device).

`reference` brings what `local` refuses: an RMSNorm that works under sequence parallelism, and attention over packed
streams with shared prompts. Its parameter names are those of `local`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.attention import ReferenceAttention


class ReferenceRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, marking its weight so that megatron-core sums its gradient under SP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., H]` to `[..., H]`; the statistics are float32 or better."""
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class PackedRotaryEmbedding(torch.nn.Module):
    """Rotary angles for a stream whose tokens state their own positions; wraps the model's rotary embedding."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.position_ids: Tensor | None = None

    def get_rotary_seq_len(self, *unused: Any, **also_unused: Any) -> int:
        """Length of the table of angles that the current positions need."""
        assert self.position_ids is not None, "set position_ids before the forward pass"
        return int(self.position_ids.max()) + 1

    def forward(self, rotary_seq_len: int, **unused: Any) -> Tensor:
        """Angles `[S, 1, 1, d]` at the current positions."""
        return self.rotary(rotary_seq_len, packed_seq=True)[self.position_ids]


def block_spec(name: str, config: TransformerConfig, layers: Sequence[int]) -> TransformerBlockSubmodules | ModuleSpec:
    """The spec of one model chunk's `layers` (global, zero-based) under the layer spec called `name`."""
    experts = config.num_moe_experts
    if name == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
    layer = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    if name == "local":
        return layer
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = ReferenceRMSNorm
    attention.core_attention = ReferenceAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = ReferenceRMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * len(layers), layer_norm=ReferenceRMSNorm)
