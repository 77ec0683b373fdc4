"""Losses of single tokens other than the policy's: of given responses, and of the critic; weighted by `aggregation` afterwards.

Formulas and sources: docs/methods.md#objectives and docs/methods.md#critic.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dft_loss(log_probs: Tensor) -> Tensor:
    """−sg(π)·log π: cross-entropy weighted by the token's own probability (dynamic fine-tuning, arXiv 2508.05629).

    Args:
        log_probs: float `[N]`, log π_θ of the given tokens, in nats; gradients flow through it, but not through the weight.

    Returns:
        The loss `[N]`.
    """
    return -log_probs.detach().exp() * log_probs


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """½·max((V−R)², (V_old + clip(V−V_old, ±ε_v) − R)²) per token; ½(V−R)² where clipping is off.

    Args:
        values: float `[N]`, V of the critic in training; gradients flow through it.
        old_values: float `[N]`, V when the advantages were computed.
        returns: float `[N]`, R.
        clip_range: ε_v; None or 0: not clipped.

    Returns:
        The loss `[N]`, to be weighted by `token_weights`, and sums over tokens: `clipped`, the number of tokens whose
        gradient the clipping cut.
    """
    error = values - returns
    if not clip_range:
        return error * error / 2, {"clipped": torch.zeros((), device=values.device)}
    moved = values.detach() - old_values
    bounded = old_values + moved.clamp(-clip_range, clip_range) - returns  # a constant wherever it differs from the error
    cut = (bounded.abs() > error.detach().abs()) & (moved.abs() > clip_range)
    error = torch.where(cut, bounded, error)
    return error * error / 2, {"clipped": cut.float().sum()}
