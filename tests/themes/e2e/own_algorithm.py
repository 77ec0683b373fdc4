"""What a user may write: an advantage estimator and a policy loss, named in the config by their import path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import AdvantageInputs, AdvantageOutputs, LossSettings


def half(inputs: AdvantageInputs) -> AdvantageOutputs:
    """One half at every token."""
    return AdvantageOutputs(advantages=torch.where(inputs.mask, 0.5, 0.0))


def linear(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, response: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Any]]:
    """-2A, with a gradient of its own, and a metric of 7 at every token."""
    loss = -2.0 * advantages + (log_probs - log_probs.detach())
    return loss, {"own": torch.full_like(advantages, 7.0).sum()}
