"""Multi-head latent attention for the `reference` layer spec: streams `[S/cp, 1, ...]` whose tokens state their positions.

megatron-core's own runs packed sequences in Transformer Engine's shape only, and with torch's linear layers does not sum
the gradient of the shared rotary key over tensor parallelism. Here the down projections are whole on every tensor rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules, MultiLatentAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.megatron.attention import StreamAttention
from megarl.megatron.options import has_transformer_engine
from megarl.models.deepseek_v3 import LATENT_NORM_EPS

if not has_transformer_engine():  # 0.16.1 believes that it is there, with a mock that is no type in place of its layer
    multi_latent_attention.HAVE_TE = False


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias, whole on every tensor rank; under sequence parallelism megatron-core sums its gradient."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., input]` to `[..., output]`."""
        return torch.nn.functional.linear(hidden, self.weight)


class Rotation(NamedTuple):
    """Cosines and sines `[S/cp, 1, 1, d / 2]` of this rank's tokens, with the scale of the model's rotary embedding."""

    cos: Tensor
    sin: Tensor

    @property
    def width(self) -> int:
        """Dimensions that rotate."""
        return 2 * self.cos.shape[-1]

    def pairs(self, heads: Tensor) -> Tensor:
        """Rotate neighbouring dimensions of `[S/cp, ..., d]`; the pairs' first halves come first in the result."""
        return self._rotated(heads, heads[..., 0::2], heads[..., 1::2])

    def halves(self, heads: Tensor) -> Tensor:
        """Rotate the first half of the dimensions of `[S/cp, ..., d]` against the second."""
        return self._rotated(heads, *heads.chunk(2, dim=-1))

    def _rotated(self, heads: Tensor, first: Tensor, second: Tensor) -> Tensor:
        cos, sin = (wave.view(len(wave), *[1] * (heads.dim() - 2), -1) for wave in self)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def has_no_positions(config: TransformerConfig, layer_number: int) -> bool:
    """Return whether nothing rotates in a layer, counted from 1."""
    return bool(config.no_rope_freq) and bool(config.no_rope_freq[layer_number - 1])  # type: ignore[index]


class LatentSelfAttention(MultiLatentAttention):
    """megatron-core's latent attention with projections, parameter names and rotary frequencies as it has them.

    Each head's query and key are a part without rope, from a latent, and a rotated part; all heads share the rotated key.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            **kwargs,
        )
        queries = config.num_attention_heads * self.q_head_dim
        if config.q_lora_rank is None:
            self.linear_q_proj = self._split_linear(submodules.linear_q_proj, config.hidden_size, queries)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
            self.q_layernorm = self._norm(submodules.q_layernorm, config.q_lora_rank)
            self.linear_q_up_proj = self._split_linear(submodules.linear_q_up_proj, config.q_lora_rank, queries)
        latent_and_rope = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent_and_rope, config)
        self.kv_layernorm = self._norm(submodules.kv_layernorm, config.kv_lora_rank)
        keys_and_values = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj = self._split_linear(submodules.linear_kv_up_proj, config.kv_lora_rank, keys_and_values)
        table: Any = self.rotary_pos_emb(2, packed_seq=True)
        angles, scale = table if config.rope_type == "yarn" else (table, 1.0)
        self.rotary_scale: float = scale
        # The angles at position 1 are the frequencies; the table holds each twice.
        frequencies = angles[1].flatten().chunk(2)[0].clone()
        frequencies = frequencies * 0 if has_no_positions(config, layer_number) else frequencies
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _split_linear(self, module: Any, input_size: int, output_size: int) -> torch.nn.Module:
        return build_module(
            module,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )

    def _norm(self, module: Any, width: int) -> torch.nn.Module:
        return build_module(module, hidden_size=width, config=self.config, eps=LATENT_NORM_EPS)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: StreamAttention | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """From `[S/cp, 1, H]` (split once more under sequence parallelism) to query, key and value `[S/cp, 1, heads/tp, d]`."""
        assert packed_seq_params is not None, "the reference attention runs packed streams only"
        assert packed_seq_params.position_ids is not None
        config, heads = self.config, self.num_attention_heads_per_partition
        of_query = None
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            of_query = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query, _ = self.linear_q_up_proj(of_query)
        query = query.unflatten(-1, (heads, self.q_head_dim))
        latent, key_rope = self.linear_kv_down_proj(hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key_value = key_value.unflatten(-1, (heads, config.qk_head_dim + config.v_head_dim))
        # Every tensor rank's heads use the whole rotary key: going backward, its gradient is the sum over the ranks.
        if config.sequence_parallel:
            key_rope = gather_from_sequence_parallel_region(key_rope, group=self.pg_collection.tp)
        else:
            key_rope = copy_to_tensor_model_parallel_region(key_rope, group=self.pg_collection.tp)
        query_nope, query_rope = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        key_nope, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        angles = packed_seq_params.position_ids[:, None, None, None] * self.frequencies
        rotation = Rotation(*((wave * self.rotary_scale).to(query.dtype) for wave in (angles.cos(), angles.sin())))
        query = torch.cat([query_nope, rotation.pairs(query_rope)], dim=-1)
        key_rope = rotation.pairs(key_rope[:, :, None]).expand(*key_nope.shape[:-1], -1)
        key = torch.cat([key_nope, key_rope], dim=-1)
        return self.prepared(query, key, hidden_states, of_query, rotation, packed_seq_params), key, value, None, None

    def prepared(
        self, query: Tensor, key: Tensor, hidden: Tensor, latent: Tensor | None, rotation: Rotation, packed: StreamAttention
    ) -> Tensor:
        """For layers that do more before their core attention: the query, which goes there next.

        `hidden` and the normed `latent` of the queries, None where they have none, are split under sequence parallelism.
        """
        return query
