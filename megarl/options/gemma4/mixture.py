"""Gemma 4's mixture beside the MLP: both are given the residual stream, and have norms of their own before and behind."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megarl.megatron.norms import ReferenceRMSNorm, UnitNorm
from megarl.megatron.own_mixtures import OwnMixture, parts_of
from megarl.megatron.routers import OwnRouter, of_all_experts


class NormedRouter(OwnRouter):
    """Scores experts by a softmax of a normed and scaled token; the chosen ones' weights sum to one, times a number of each."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.norm = UnitNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.expert_scale = torch.nn.Parameter(torch.ones(self.num_experts, dtype=config.params_dtype))
        for parameter in (self.scale, self.expert_scale):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weights and choices `[T, E]` for tokens `[..., H]`."""
        return super().forward(self.norm(input) * self.scale * self.config.hidden_size**-0.5, *args, **kwargs)

    def routing(self, logits: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor]:
        """Weights and choices `[T, E]` of experts from logits `[..., E]`."""
        logits = logits.view(-1, self.num_experts)
        scores = logits.float().softmax(-1)
        chosen = self.chosen(scores.detach())
        weights = scores.gather(1, chosen)
        return of_all_experts(logits, chosen, weights / weights.sum(-1, keepdim=True) * self.expert_scale[chosen])


class NormedMLP(SharedExpertMLP):
    """The MLP, as what megatron-core takes for an expert of all tokens."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.pre_norm = ReferenceRMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_norm = ReferenceRMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[S, B, H]` to `[S, B, H]`."""
        normed: Tensor = self.post_norm(super().forward(self.pre_norm(hidden_states)))
        return normed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See megatron-core's; the norms are whole on every tensor rank."""
        norms = {name: self._modules.pop(name) for name in ("pre_norm", "post_norm")}
        try:
            entries: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self._modules |= norms
        group = parallel_state.get_tensor_model_parallel_group()
        for name, norm in norms.items():
            entries |= sharded_state_dict_default(norm, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        return entries


class NormBesideBias(ReferenceRMSNorm):
    """A norm in the place of a projection, which gives a bias, too."""

    def forward(self, hidden: Tensor) -> Any:
        """`[..., H]`, and no bias."""
        return super().forward(hidden), None


class NormedMixture(OwnMixture):
    """megatron-core's layer, with norms where one with a latent has projections: before the experts, and behind them."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.config = copy.copy(config)
        self.config.moe_latent_size = config.hidden_size
        self.fc1_latent_proj = NormBesideBias(config, config.hidden_size, config.layernorm_epsilon)
        self.fc2_latent_proj = NormBesideBias(config, config.hidden_size, config.layernorm_epsilon)


def mixture_beside(mixture: Any) -> type[NormedMixture]:
    """The class of such a mixture, of the parts that the spec `mixture` has."""
    parts = parts_of(mixture)
    shared = parts.shared_experts
    shared = partial(NormedMLP, **shared.keywords) if isinstance(shared, partial) else replace(shared, module=NormedMLP)
    parts = replace(parts, router=NormedRouter, shared_experts=shared)
    return type("NormedMixture", (NormedMixture,), {"parts": parts})
