"""LongCat-Flash's layer: two layers of attention and an MLP, and a mixture beside the first MLP, added behind the second.

The mixture's exchange of tokens may so be under way while the second half computes; here one follows the other.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megarl.megatron.attention import PackedSequences
from megarl.megatron.latent_attention import LatentSelfAttention
from megarl.megatron.own_mixtures import parts_of
from megarl.options.shortcut_experts.sizes import ShortcutLayers


class ScaledLatentAttention(LatentSelfAttention):
    """Latent attention whose normed latents are multiplied by the numbers that `own` says."""

    def __init__(self, *args: Any, own: ShortcutLayers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for norm, scale in ((self.q_layernorm, own.query_scale), (self.kv_layernorm, own.key_value_scale)):
            norm.register_forward_hook(_times(scale))


def _times(scale: float) -> Any:
    def multiply(module: torch.nn.Module, inputs: tuple[Any, ...], normed: Tensor) -> Tensor:
        return normed * scale

    return multiply


class ShortcutLayer(TransformerLayer):
    """megatron-core's layer of attention and a mixture, with an MLP beside that (`dense_mlp`) and a layer behind (`second`)."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int = 1,
        *args: Any,
        dense: Any,
        second: ModuleSpec,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.dense_mlp = MLP(config, parts_of(dense), tp_group=self.tp_group)
        self.second = build_module(second, config=config, layer_number=layer_number, **kwargs)

    def forward(
        self, hidden_states: Tensor, *unused: Any, packed_seq_params: PackedSequences | None = None, **also_unused: Any
    ) -> tuple[Tensor, None]:
        """`[S, 1, H]` (split under sequence parallelism) to the same."""
        packed: dict[str, Any] = {"attention_mask": None, "packed_seq_params": packed_seq_params}
        attended, _ = self.self_attention(self.input_layernorm(hidden_states), **packed)
        hidden = hidden_states + attended
        normed = self.pre_mlp_layernorm(hidden)
        shortcut, _ = self.mlp(normed)
        output, _ = self.dense_mlp(normed)
        hidden, _ = self.second(hidden + output, **packed)
        hidden = hidden + shortcut
        return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True), None
