"""Attention whose heads are each multiplied by a sigmoid, of a projection of the layer's input (Step 3.5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.rotary import RotarySetSelfAttention


class HeadGatedSelfAttention(RotarySetSelfAttention):
    """The attention of a model with two sets of frequencies, with a gate for each head.

    Rows of the gates are in `linear_qkv`, behind the q heads of their group (`GroupedQKV.gate_rows` = 1).
    """

    def __init__(self, config: TransformerConfig, submodules: Any, *args: Any, **kwargs: Any) -> None:
        rotary_set, heads = kwargs["rotary_set"], kwargs["heads"]
        gates = heads.num_heads if rotary_set and heads is not None else config.num_attention_heads
        super().__init__(config, replace(submodules, linear_qkv=_wider(submodules.linear_qkv, gates)), *args, **kwargs)
        self.config.attention_output_gate = True  # a copy's, of which megatron-core reads the rest as it builds

    def get_query_key_value_tensors(self, hidden_states: Tensor, *unused: Any, **also_unused: Any) -> Any:
        """Query, key, value `[S, 1, heads, d]` and the gates of the query's heads, in the query's shape."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, dim = self.config.num_query_groups or 1, self.hidden_size_per_attention_head
        ranks_of_group = max(self.world_size // groups, 1)
        if ranks_of_group > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed)
            mixed = mixed.chunk(groups, dim=-1)[get_tensor_model_parallel_rank() // ranks_of_group]
        of_group = self.config.num_attention_heads // groups
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        query, gate, key, value = mixed.split([of_group * dim, of_group, dim, dim], dim=-1)
        query, gate = query.reshape(*query.shape[:2], -1, dim), gate.reshape(*gate.shape[:2], -1, 1)
        if ranks_of_group > 1:
            heads = of_group // ranks_of_group
            first = get_tensor_model_parallel_rank() % ranks_of_group * heads
            query, gate = query.narrow(2, first, heads), gate.narrow(2, first, heads)
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        key = key if self.k_layernorm is None else self.k_layernorm(key)
        return query, key, value, gate.expand(query.shape)


def _wider(linear: Any, gates: int) -> Any:
    """A maker of the linear layer whose spec is `linear`, with rows for so many gates."""

    class Wider:
        """Made in place of the narrower one; megatron-core builds a class or calls it."""

        def __new__(cls, inputs: int, outputs: int, **kwargs: Any) -> Any:  # type: ignore[misc]
            return build_module(linear, inputs, outputs + gates, **kwargs)

    return Wider
