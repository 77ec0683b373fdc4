"""A mixture of experts that work in a narrower latent, on torch's linear layers: megatron-core's needs Transformer Engine.

Router and shared expert see the residual stream; tokens are projected down before they travel to experts, and up after.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.latent_attention import ReplicatedLinear
from megarl.megatron.own_mixtures import OwnMixture, parts_of


class LatentProjection(ReplicatedLinear):
    """A projection to the latent or back, whole on every tensor rank."""

    def forward(self, hidden: Tensor) -> Any:
        """`[..., input]` to `[..., output]`, and no bias."""
        return super().forward(hidden), None


class LatentMixture(OwnMixture):
    """megatron-core's layer, built as one without a latent but for its experts."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        of_hidden = copy.copy(config)
        of_hidden.moe_latent_size = None
        super().__init__(of_hidden, *args, **kwargs)
        assert config.moe_latent_size is not None, "the mixture has no latent"
        self.config = config
        self.fc1_latent_proj = LatentProjection(config.hidden_size, config.moe_latent_size, config)
        self.fc2_latent_proj = LatentProjection(config.moe_latent_size, config.hidden_size, config)


def latent_mixture(mixture: Any, latent: int) -> type[LatentMixture]:
    """The class of a mixture whose spec is `mixture`, with a latent of this width."""
    parts = parts_of(mixture)
    experts = parts.experts

    class Experts:
        """A maker of the experts, of the latent's width."""

        def __new__(cls, number: int, config: TransformerConfig, *args: Any, **kwargs: Any) -> torch.nn.Module:  # type: ignore[misc]
            of_latent = copy.copy(config)
            of_latent.moe_latent_size = latent
            if isinstance(experts, (ModuleSpec, type)):
                built: torch.nn.Module = build_module(experts, number, of_latent, *args, **kwargs)
                return built
            made: torch.nn.Module = experts(number, of_latent, *args, **kwargs)
            return made

    return type("LatentMixture", (LatentMixture,), {"parts": replace(parts, experts=Experts)})
