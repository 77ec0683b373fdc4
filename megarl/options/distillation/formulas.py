"""On-policy distillation: reverse KL at the sampled tokens as an advantage, divergences over the vocabulary as a loss.

Formulas and sources: docs/methods.md#on-policy-distillation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import discounted_sum

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
TAIL_FLOOR = 1e-6
"""Smallest probability that a tail counts with: log-probs in float32 do not tell a smaller one from rounding."""


@dataclass(frozen=True)
class DistillationTerm:
    """The distillation term of a loss: `coef` times one of `DIVERGENCES`; `beta` is that of `jsd`."""

    coef: float
    divergence: str = "reverse_kl"
    beta: float = 0.5


def distillation_advantages(student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """−Σ_{k≥t} γ^{k−t}·(log π − log π_T) over the sampled tokens from t on (γ⁰ = 1), in nats; 0 outside the mask.

    With γ = 0 the mean of A·∇log π is minus the gradient of KL(π‖π_T) of each token given those before it, summed along
    responses that the gradient takes as given; with γ = 1 it is minus that of the KL between whole responses (MiniLLM,
    arXiv 2306.08543).

    Args:
        student_log_probs: float `[B, T]`, log-probs of the tokens under the policy that is to be improved.
        teacher_log_probs: float `[B, T]`.
        mask: bool `[B, T]`, tokens that the policy sampled; the others are skipped, and do not discount.
        gamma: from 0 to 1.

    Returns:
        `[B, T]` in the dtype of `student_log_probs`.
    """
    return discounted_sum(teacher_log_probs - student_log_probs, mask, gamma)


def vocabulary_divergence(student: Tensor, teacher: Tensor, term: DistillationTerm) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence of two distributions over k tokens and the tail, all other tokens together, for each of N positions.

    With p the student's and q the teacher's probabilities of these k + 1 outcomes: `reverse_kl` KL(p‖q), `forward_kl`
    KL(q‖p), `jsd` β·KL(q‖m) + (1−β)·KL(p‖m) with m = βq + (1−β)p (GKD, arXiv 2306.13649, section 2). Outcomes that are
    joined can only make a divergence smaller, so it is at most the one over the whole vocabulary, and 0 where p = q. A tail
    counts with at least `TAIL_FLOOR`, below which it has no gradient.

    Args:
        student: float `[N, k]`, log-probs of k different tokens under the policy, gradients flow through them.
        teacher: float `[N, k]`, those of the same tokens under the teacher.
        term: which divergence.

    Returns:
        `[N]` in nats, and sums over positions: `loss`, and `policy_tail` and `teacher_tail`, the probability of the tails.
    """
    p, q = _with_tail(student), _with_tail(teacher.detach())
    if term.divergence == "reverse_kl":
        divergence = _kl(p, q)
    elif term.divergence == "forward_kl":
        divergence = _kl(q, p)
    else:
        mixture = torch.logaddexp(q + math.log(term.beta), p + math.log1p(-term.beta))
        divergence = term.beta * _kl(q, mixture) + (1 - term.beta) * _kl(p, mixture)
    sums = {"loss": divergence, "policy_tail": p[:, -1].exp(), "teacher_tail": q[:, -1].exp()}
    return divergence, {name: values.detach().sum() for name, values in sums.items()}


def _with_tail(log_probs: Tensor) -> Tensor:
    """`[N, k + 1]`: behind `log_probs` `[N, k]` the log of the probability that is left."""
    left = (1 - log_probs.exp().sum(1, keepdim=True)).clamp(min=TAIL_FLOOR)
    return torch.cat([log_probs, left.log()], dim=1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p‖q) of each row of log-probs `[N, k + 1]`."""
    return (p.exp() * (p - q)).sum(1)
