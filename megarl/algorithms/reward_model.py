"""Losses of reward models (docs/methods.md#objective-reward_model): pairs for an outcome model, step ends for a process model.

Losses are per pair or step: the caller divides by the number of them in the whole optimizer step.
"""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from megarl.algorithms.preference import share_above


def pairwise_reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """−log σ(r_w − r_l − margin) (Bradley–Terry; arXiv 2203.02155 eq. 1, with Llama 2's margin, 2307.09288 eq. 2).

    Args:
        chosen: float `[P]`, r_w, the scalar head at the last token of the preferred response; gradients flow through it.
        rejected: float `[P]`, r_l.
        margin: float `[P]`, by how much r_w should be above r_l, or None: 0.

    Returns:
        The loss `[P]`, and scalar sums without gradient: `accuracy`, the number of pairs with r_w > r_l, those of
        equal scores as half; `chosen_score` and `rejected_score`.
    """
    difference = chosen - rejected
    loss = -logsigmoid(difference if margin is None else difference - margin)
    return loss, {
        "accuracy": share_above(chosen.detach(), rejected.detach()).sum(),
        "chosen_score": chosen.detach().float().sum(),
        "rejected_score": rejected.detach().float().sum(),
    }


def process_reward_loss(scores: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Binary cross-entropy of σ(score) against the label at each step-end token (arXiv 2305.20050; soft labels: 2312.08935).

    Args:
        scores: float `[N]`, the scalar head at the N step ends, as logits; gradients flow through it.
        labels: `[N]`, 1 a right step, 0 a wrong one, or the probability in between that the step is right. The loss of any
            other is not a number: to refuse it here would be to wait for the device. Rows with such labels are not read.

    Returns:
        The loss `[N]`, and scalar sums without gradient: `accuracy`, the number of steps that score and label put on the
        same side of ½ (a label of ½ counts as wrong), a score of 0, which is on neither side, as half.
    """
    labels = labels.to(scores.dtype)
    loss = binary_cross_entropy_with_logits(scores, labels, reduction="none").where((labels >= 0) & (labels <= 1), nan)
    found, even = scores.detach(), torch.zeros_like(scores)
    return loss, {"accuracy": torch.where(labels > 0.5, share_above(found, even), share_above(even, found)).sum()}
