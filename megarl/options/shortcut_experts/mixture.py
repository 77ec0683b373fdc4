"""A mixture whose router may choose experts that give a token as it is, and compute nothing (LongCat-Flash)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.megatron.own_mixtures import OwnMixture, parts_of
from megarl.megatron.routers import OwnRouter, of_all_experts


class ZeroExpertRouter(OwnRouter):
    """Scores experts, and behind them `zero_experts`, by a softmax over all, and chooses with a correction bias `[E + Z]`.

    Weights are the scores of the chosen, as they are.
    """

    def __init__(self, config: TransformerConfig, *args: Any, zero_experts: int, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.num_moe_experts = (config.num_moe_experts or 0) + zero_experts
        super().__init__(config, *args, **kwargs)
        del self.expert_bias
        bias = torch.zeros(self.num_experts, dtype=torch.float32, device=torch.cuda.current_device())
        self.register_buffer("expert_bias", bias)

    def routing(self, logits: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor]:
        """Weights and choices `[T, E + Z]` from logits `[..., E + Z]`."""
        logits = logits.view(-1, self.num_experts)
        scores = logits.float().softmax(-1)
        chosen = self.chosen(scores.detach() + self.expert_bias)
        weights = scores.gather(1, chosen) * (self.config.moe_router_topk_scaling_factor or 1.0)
        return of_all_experts(logits, chosen, weights)


class ZeroExpertMixture(OwnMixture):
    """megarl's mixture of the experts that compute; what a token gives to the others is added to the output by itself."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # else it sends `moe_router_topk` copies of every token, which are fewer where a token chooses zero experts
        self.token_dispatcher.config = copy.copy(self.token_dispatcher.config)
        self.token_dispatcher.config.moe_expert_capacity_factor = float("inf")
        self._kept: Tensor | None = None
        """`[S, B, H]`: each token times its weights of zero experts, of the forward pass under way."""

    def route(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weights and choices `[T, E]` of the experts that compute."""
        weights, chosen = super().route(hidden_states, *args, **kwargs)
        experts = self.config.num_moe_experts
        unchanged = weights[:, experts:].sum(-1).view(*hidden_states.shape[:-1], 1)
        self._kept = hidden_states * unchanged.to(hidden_states.dtype)
        return weights[:, :experts].contiguous(), chosen[:, :experts].contiguous()

    def postprocess(self, output: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[S, B, H]` of all experts."""
        found: Tensor = super().postprocess(output, *args, **kwargs)
        assert self._kept is not None, "tokens are routed first"
        kept, self._kept = self._kept, None
        return found + kept


def with_zero_experts(mixture: Any, zero_experts: int) -> type[ZeroExpertMixture]:
    """The class of such a mixture, of the parts that the spec `mixture` has."""
    parts = copy.copy(parts_of(mixture))
    parts.router = partial(ZeroExpertRouter, zero_experts=zero_experts)
    return type("ZeroExpertMixture", (ZeroExpertMixture,), {"parts": parts})
