"""Rotary embeddings of a model: frequencies, also those of some layers alone, and positions that tokens state themselves.

A model whose layers do not all rotate alike has two sets of frequencies. The model's rotary embedding gives the angles of both
in one tensor, as megatron-core's recomputation passes one on, and the attention of each layer takes its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.model_config import scale_rotary
from megarl.models.layer_ropes import LayerHeads, LayerRope
from megarl.models.rope_frequencies import inverse_frequencies
from megarl.models.vision import Mrope


class PackedRotaryEmbedding(torch.nn.Module):
    """Rotary angles for a stream whose tokens state their own positions; wraps the model's rotary embedding, if any."""

    def __init__(self, rotary: torch.nn.Module | None, axes: Tensor | None = None) -> None:
        """`axes` int64 `[d]`: which of three positions each dimension goes by; None: tokens have one."""
        super().__init__()
        self.rotary, self.axes = rotary, axes
        self.positions: tuple[Tensor, int] | None = None
        """Positions of the tokens, `[S]` or `[3, S]`, and one more than the greatest."""

    def get_rotary_seq_len(self, *unused: Any, **also_unused: Any) -> int:
        """Length of the table of angles that the current positions need."""
        assert self.positions is not None, "set positions before the forward pass"
        return self.positions[1]

    def forward(self, rotary_seq_len: int, **unused: Any) -> Tensor:
        """Angles `[S, 1, 1, d]` at the current positions."""
        assert self.rotary is not None, "this model's attention layers rotate by themselves"
        assert self.positions is not None, "set positions before the forward pass"
        angles, positions = self.rotary(rotary_seq_len, packed_seq=True), self.positions[0]
        if positions.dim() == 1:
            return angles[positions]
        assert self.axes is not None, "this model's tokens have one position"
        dimensions = torch.arange(len(self.axes), device=positions.device)
        return angles[positions[self.axes].T, 0, 0, dimensions][:, None, None]


def set_rotary_embedding(
    model: Any, hf_config: dict[str, Any], mrope: Mrope | None = None, rope: LayerRope | None = None, *, counts_itself: bool
) -> None:
    """Give a GPTModel the frequencies of the decoder's Hugging Face config, and of `rope`, and the positions where layers need
    them.

    Transformer Engine's attention `counts_itself` the positions of a sequence, but not those of three axes (`mrope`).
    """
    if not model.config.multi_latent_attention:
        sets = [inverse_frequencies(hf_config, model.config.kv_channels)]
        if rope is not None:
            head_dim = model.config.kv_channels if rope.heads is None else rope.heads.head_dim
            sets.append(inverse_frequencies(rope.config, head_dim))
            for module in model.modules():
                if isinstance(module, RotarySetSelfAttention):
                    first = module.rotary_set * len(sets[0])
                    module.frequencies = slice(first, first + len(sets[module.rotary_set]))
        model.rotary_pos_emb.inv_freq = torch.cat(sets).to(torch.cuda.current_device())
    if not counts_itself or mrope is not None:
        axes = torch.tensor(mrope.axes() * 2, device=torch.cuda.current_device()) if mrope is not None else None
        # Latent attention rotates inside its layers, by the positions that travel with the stream.
        model.rotary_pos_emb = PackedRotaryEmbedding(
            None if model.config.multi_latent_attention else model.rotary_pos_emb, axes
        )


class RotarySetSelfAttention(SelfAttention):
    """megatron-core's attention in a model with two sets of frequencies: 0, that of the decoder, and 1, that of a `LayerRope`.

    It rotates by those of the set `rotary_set`, and has `heads` in set 1, if they are said. The attention factor of a scaled
    embedding is that of set 0.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, rotary_set: int, heads: LayerHeads | None = None, **kwargs: Any
    ) -> None:
        config = copy.copy(config)
        if rotary_set:
            scale_rotary(config, 1.0)
        if rotary_set and heads is not None:
            config.num_attention_heads, config.num_query_groups = heads.num_heads, heads.num_groups
            config.kv_channels = heads.head_dim
        super().__init__(config, *args, **kwargs)
        self.rotary_set, self.frequencies = rotary_set, slice(None)
        """Place of its set in all frequencies, which `set_rotary_embedding` fills in."""

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the layer as megatron-core does; `rotary_pos_emb` are the angles `[S, 1, 1, 2 * n]` of all sets, twice
        one behind the other."""
        assert rotary_pos_emb is not None, "a model with several sets of frequencies rotates in all layers"
        angles = rotary_pos_emb.unflatten(-1, (2, -1))[..., self.frequencies].flatten(-2)
        return super().forward(hidden_states, *args, rotary_pos_emb=angles, **kwargs)
