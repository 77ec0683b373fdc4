"""Losses of the tokens of given responses, one number per token, weighted by `aggregation` afterwards.

Formulas and sources: docs/methods.md#objectives.
"""

from __future__ import annotations

from torch import Tensor


def dft_loss(log_probs: Tensor) -> Tensor:
    """−sg(π)·log π: cross-entropy weighted by the token's own probability (dynamic fine-tuning, arXiv 2508.05629).

    Args:
        log_probs: float `[N]`, log π_θ of the given tokens, in nats; gradients flow through it, but not through the weight.

    Returns:
        The loss `[N]`.
    """
    return -log_probs.detach().exp() * log_probs
