"""The router of DeepSeek-V4: scores are roots of softpluses, and in some layers a token's id says its experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.errors import LayoutError, ModelError
from megarl.megatron.routers import OwnRouter, of_all_experts

LEAST_SUM = 1e-20


class RootRouter(OwnRouter):
    """Chooses by scores and a correction bias, until it is told to `choose_by_token`. Weights are scores over their sum."""

    token_experts: Tensor | None
    """int64 `[V, k]`, the experts of each token id, where these alone choose."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.score_function = "sqrtsoftplus"  # which losses that keep experts in balance ask for
        self.register_buffer("token_experts", None)
        self.token_ids: Tensor | None = None
        """int64 `[T]`: ids of the tokens of the forward pass under way."""
        self._is_checked = False

    def choose_by_token(self, vocab: int) -> None:
        """Have a table of `vocab` ids choose experts; it is a buffer that a checkpoint holds."""
        if "moe" in (self.config.recompute_modules or ()) and self.config.recompute_granularity == "selective":
            raise LayoutError(
                "recompute_modules has 'moe', but some of this model's routers choose by the ids of a micro-batch's tokens, "
                "which such layers do not keep; it must be left out"
            )
        bias = self._buffers.pop("expert_bias")
        assert bias is not None, "the config asks for biases"
        self.expert_bias: Any = torch.zeros_like(bias)  # no part of a checkpoint: nothing is chosen by it
        self.token_experts = torch.arange(self.topk, device=bias.device).repeat(vocab, 1)

    def routing(self, logits: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor]:
        """Weights and choices `[T, E]` of experts from logits `[..., E]`."""
        logits = logits.view(-1, self.config.num_moe_experts or 0)
        scores = F.softplus(logits.to(torch.promote_types(logits.dtype, torch.float32))).sqrt()
        chosen = self.chosen(scores)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM) * (self.config.moe_router_topk_scaling_factor or 1.0)
        return of_all_experts(logits, chosen, weights)

    def best(
        self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose by the bias, too, or by the table of the tokens' ids; see `OwnRouter`."""
        if self.token_experts is None:
            chosen = torch.topk(scores.detach() + self.expert_bias, k=topk, dim=1).indices
        else:
            assert self.token_ids is not None, "set token_ids before the forward pass"
            self._check_table()
            chosen = self.token_experts[self.token_ids]
        return scores.gather(1, chosen), chosen

    def _check_table(self) -> None:
        """Raise ModelError, once, if the table names an expert twice for an id, or one that there is not."""
        if self._is_checked:
            return
        assert self.token_experts is not None
        rows = self.token_experts.sort(-1).values
        if bool((rows[:, 1:] == rows[:, :-1]).any()) or int(rows.min()) < 0 or int(rows.max()) >= self.num_experts:
            raise ModelError(
                f"a tensor tid2eid names an expert twice for a token id, or one beyond {self.num_experts - 1}; each id must "
                f"have {self.topk} different experts"
            )
        self._is_checked = True
