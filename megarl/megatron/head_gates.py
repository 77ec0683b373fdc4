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
        super().__init__(config, replace(submodules, linear_qkv=with_more_rows(submodules.linear_qkv, gates)), *args, **kwargs)
        self.config.attention_output_gate = True  # a copy's, of which megatron-core reads the rest as it builds

    def get_query_key_value_tensors(self, hidden_states: Tensor, *unused: Any, **also_unused: Any) -> Any:
        """Query, key, value `[S, 1, heads, d]` and the gates of the query's heads, in the query's shape."""
        dim, gates = self.hidden_size_per_attention_head, self.config.num_attention_heads // (self.config.num_query_groups or 1)
        places, query, gate, key, value = rows_of_groups(self, hidden_states, gates, dim, dim)
        query, gate = (t.reshape(*t.shape[:2], -1, of_head)[:, :, places] for t, of_head in ((query, dim), (gate, 1)))
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        key = key if self.k_layernorm is None else self.k_layernorm(key)
        return query, key, value, gate.expand(query.shape)


def rows_of_groups(attention: Any, hidden_states: Tensor, *widths: int) -> tuple[Any, ...]:
    """Rows that `linear_qkv` gives for `[S, 1, H]`, of this rank's query groups: where this rank's heads are among those of the
    query, its rows `[S, 1, groups, heads·d]`, and of each width what stands behind them, `[S, 1, groups, width]`."""
    mixed, places = of_own_group(attention, attention.linear_qkv(hidden_states)[0])
    of_group = attention.config.num_attention_heads // (attention.config.num_query_groups or 1)
    mixed = mixed.unflatten(-1, (attention.num_query_groups_per_partition, -1))
    return places, *mixed.split([of_group * attention.hidden_size_per_attention_head, *widths], dim=-1)


def of_own_group(attention: Any, mixed: Tensor) -> tuple[Tensor, slice]:
    """Rows `[S, 1, rows]` that `linear_qkv` gives, of this rank's query groups, and where this rank's heads are among theirs.

    Where several tensor ranks share a group, each is given all of it, and has some of its heads.
    """
    groups, rank = attention.config.num_query_groups, get_tensor_model_parallel_rank()
    ranks_of_group: int = attention.world_size // groups
    if ranks_of_group <= 1:
        return mixed, slice(None)
    mixed = all_gather_last_dim_from_tensor_parallel_region(mixed)
    heads = attention.config.num_attention_heads // attention.world_size
    first = rank % ranks_of_group * heads
    return mixed.chunk(groups, dim=-1)[rank // ranks_of_group], slice(first, first + heads)


def with_more_rows(linear: Any, more: int) -> Any:
    """A maker of the linear layer whose spec is `linear`, with so many rows more than it is asked for."""

    class Wider:
        """Made in place of the other one; megatron-core builds a class or calls it."""

        def __new__(cls, inputs: int, outputs: int, **kwargs: Any) -> Any:  # type: ignore[misc]
            return build_module(linear, inputs, outputs + more, **kwargs)

    return Wider
