"""megatron-core's layer with what some families do to the output of attention and MLP before it joins the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.megatron.norms import ReferenceRMSNorm
from megarl.models.architecture import DecoderTraits


class BranchLayer(TransformerLayer):
    """A layer whose branches are normed (`post_self_attn_layernorm`, `post_mlp_layernorm`) or scaled, as `traits` say."""

    def __init__(self, config: TransformerConfig, *args: Any, traits: DecoderTraits, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.multiplier = traits.residual_multiplier
        if traits.post_norms:
            self.post_self_attn_layernorm = ReferenceRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.post_mlp_layernorm = ReferenceRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        for add, norm in (("self_attn_bda", "post_self_attn_layernorm"), ("mlp_bda", "post_mlp_layernorm")):
            setattr(self, add, partial(self._joining, getattr(self, add), norm))

    def _joining(self, add: Any, norm: str, *how: bool) -> Callable[..., Tensor]:
        """In place of megatron-core's `get_bias_dropout_add`, which is `add`: what adds a branch to the residual stream."""

        def join(branch_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            branch, bias = branch_and_bias
            assert bias is None, "a branch that is normed or scaled has no bias of its own"
            branch = getattr(self, norm)(branch) if hasattr(self, norm) else branch
            branch = branch * self.multiplier if self.multiplier != 1.0 else branch
            return add(*how)((branch, None), residual, dropout)

        return join
