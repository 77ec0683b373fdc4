"""The maths of a step as pure functions on tensors: torch only, one process, no I/O."""

from megarl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageOutputs,
    RunningMean,
    masked_whiten,
    token_rewards,
)
from megarl.algorithms.aggregation import AGGREGATIONS, token_weights
from megarl.algorithms.kl import KL_ESTIMATORS, AdaptiveKl, kl_per_token
from megarl.algorithms.policy_losses import POLICY_LOSSES, LossSettings, PolicyLoss
from megarl.algorithms.registry import Registry
from megarl.algorithms.value_loss import value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdaptiveKl",
    "AdvantageInputs",
    "AdvantageOutputs",
    "LossSettings",
    "PolicyLoss",
    "Registry",
    "RunningMean",
    "kl_per_token",
    "masked_whiten",
    "token_rewards",
    "token_weights",
    "value_loss",
]
