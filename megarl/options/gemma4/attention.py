"""Gemma 4's attention: heads by kind of layer, values that are normed or are keys, and keys and values of an earlier layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.head_gates import of_own_group, with_more_rows
from megarl.megatron.norms import UnitNorm
from megarl.megatron.rotary import RotarySetSelfAttention
from megarl.options.gemma4.sizes import OwnKind


class Gemma4Attention(RotarySetSelfAttention):
    """The attention of a layer of this `kind`. `kept` has, by layer, what the chunk's later layers take of its keys and values.

    These are normed and not yet rotated: a layer that takes them rotates as their own does.
    """

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, kind: OwnKind, kept: dict[int, Any], **kwargs: Any
    ) -> None:
        heads = kwargs["heads"] if kwargs["rotary_set"] else None
        groups, dim = (config.num_query_groups, config.kv_channels) if heads is None else (heads.num_groups, heads.head_dim)
        missing = 2 if kind.takes is not None else int(kind.keys_are_values)
        submodules = replace(submodules, linear_qkv=with_more_rows(submodules.linear_qkv, -missing * groups * dim))
        if kind.takes is not None:
            submodules = replace(submodules, k_layernorm=IdentityOp)
        super().__init__(config, submodules, *args, **kwargs)
        self.kind, self.kept = kind, kept
        self.value_norm = UnitNorm(config, dim, config.layernorm_epsilon)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *unused: Any, **also_unused: Any) -> Any:
        """Query, key and value `[S, 1, heads, d]`."""
        mixed, _ = self.linear_qkv(hidden_states)
        dim = self.hidden_size_per_attention_head
        if self.kind.takes is not None:
            key, value = self.kept[self.kind.takes]
            return self.q_layernorm(mixed.unflatten(-1, (-1, dim))), key, value
        mixed, places = of_own_group(self, mixed)
        of_group = self.config.num_attention_heads // (self.config.num_query_groups or 1)
        parts = [of_group * dim, dim] if self.kind.keys_are_values else [of_group * dim, dim, dim]
        query, key, *values = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1)).split(parts, dim=-1)
        query = query.reshape(*query.shape[:2], -1, dim)[:, :, places]
        key, value = self.k_layernorm(key), self.value_norm(values[0] if values else key)
        if self.kind.is_taken:
            self.kept[self.layer_number - 1] = key, value
        return self.q_layernorm(query), key, value
