"""Attention whose heads of values are not as wide as those of keys, and are multiplied by a number (MiMo-V2-Flash)."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.head_gates import rows_of_groups, with_more_rows
from megarl.megatron.rotary import RotarySetSelfAttention
from megarl.models.architecture import ValueHeads


class WideValueSelfAttention(RotarySetSelfAttention):
    """The attention of a model with two sets of frequencies, with `values` as wide as these say.

    Layers that have not `has_sinks` have none, whatever the config's `softmax_type` is.
    """

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, values: ValueHeads, has_sinks: bool, **kwargs: Any
    ) -> None:
        if not has_sinks:
            config = copy.copy(config)
            config.softmax_type = "vanilla"
        heads = kwargs["heads"] if kwargs["rotary_set"] else None
        count, groups, dim = (
            (config.num_attention_heads, config.num_query_groups or 1, config.kv_channels or 1)
            if heads is None
            else (heads.num_heads, heads.num_groups, heads.head_dim)
        )
        more = values.width - dim
        parts = replace(
            submodules,
            linear_qkv=with_more_rows(submodules.linear_qkv, groups * more),
            linear_proj=_with_more_columns(submodules.linear_proj, count * more),
            core_attention=partial(submodules.core_attention, k_channels=dim, v_channels=values.width),
        )
        super().__init__(config, parts, *args, **kwargs)
        self.values, self.val_hidden_size = values, values.width

    def get_query_key_value_tensors(self, hidden_states: Tensor, *unused: Any, **also_unused: Any) -> Any:
        """Query and key `[S, 1, heads, d]`, and value `[S, 1, heads, v]`."""
        dim = self.hidden_size_per_attention_head
        places, query, key, value = rows_of_groups(self, hidden_states, dim, self.values.width)
        query = query.reshape(*query.shape[:2], -1, dim)[:, :, places]
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        key = key if self.k_layernorm is None else self.k_layernorm(key)
        return query, key, value * self.values.scale


def _with_more_columns(linear: Any, more: int) -> Any:
    """A maker of the linear layer whose spec is `linear`, with so many columns more than it is asked for."""

    class Longer:
        """Made in place of the other one; megatron-core builds a class or calls it."""

        def __new__(cls, inputs: int, outputs: int, **kwargs: Any) -> Any:  # type: ignore[misc]
            return build_module(linear, inputs + more, outputs, **kwargs)

    return Longer
