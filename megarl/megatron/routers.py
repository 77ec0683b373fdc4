"""Routers that megatron-core does not have."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.errors import LayoutError
from megarl.megatron.options import has_transformer_engine

if not has_transformer_engine():  # megatron-core asks whether this is None, and leaves it undefined
    moe_utils.te_general_gemm = None


class OwnRouter(TopKRouter):
    """The part that is the same in all: who is chosen by which scores, in training or by a replay, and how it is told."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        """Raise LayoutError where choices are to be dropped, which these routers do not do."""
        if config.moe_expert_capacity_factor is not None:
            raise LayoutError(
                f"moe_expert_capacity_factor is {config.moe_expert_capacity_factor:g}, but this model's router drops no "
                "choices; it must be left out"
            )
        super().__init__(config, *args, **kwargs)

    def best(
        self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts `[T, k]` that tokens choose by `[T, E]`, as megatron-core's routing replay asks for them."""
        return torch.topk(scores, k=topk, dim=1)

    def chosen(self, scores: Tensor) -> Tensor:
        """Experts `[T, k]` that tokens choose by `[T, E]`, or those of a replay."""
        if self.router_replay is None:
            return self.best(scores, self.topk)[1]
        experts: Tensor = self.router_replay.get_replay_topk(scores, self.topk, None, None, self.best)[1]
        return experts


def of_all_experts(logits: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and choices `[T, E]`, like `logits`, of the `chosen` experts and their `weights` `[T, k]`."""
    of_all = torch.zeros_like(logits).scatter(1, chosen, weights.type_as(logits))
    return of_all, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


class CorrectedSoftmaxRouter(OwnRouter):
    """Scores experts by a softmax over all and chooses with a correction bias `[1, E]` (ERNIE 4.5).

    Weights are the scores of the chosen over their sum, which counts as `least_sum` at least.
    """

    def __init__(self, config: TransformerConfig, *args: Any, least_sum: float, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.least_sum = least_sum
        del self.expert_bias
        bias = torch.zeros(1, self.num_experts, dtype=torch.float32, device=torch.cuda.current_device())
        self.register_buffer("expert_bias", bias)

    def routing(self, logits: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor]:
        """Weights and choices `[T, E]` of experts from logits `[..., E]`."""
        logits = logits.view(-1, self.num_experts)
        scores = logits.float().softmax(-1)
        chosen = self.chosen(scores.detach() + self.expert_bias)
        weights = scores.gather(1, chosen)
        return of_all_experts(logits, chosen, weights / weights.sum(-1, keepdim=True).clamp_min(self.least_sum))
