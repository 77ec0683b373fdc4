"""The maths of a step as pure functions on tensors: torch only, one process, no I/O."""

from megarl.algorithms import group_advantages, token_advantages  # noqa: F401  they register their estimators
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
from megarl.algorithms.off_policy import CORRECTIONS, correction, mismatch
from megarl.algorithms.policy_losses import POLICY_LOSSES, LossSettings, PolicyLoss
from megarl.algorithms.preference import PREFERENCE_LOSSES, PreferenceLoss, PreferenceSettings, kto, kto_kl_reference
from megarl.algorithms.registry import Registry
from megarl.algorithms.reward_model import pairwise_reward_loss, process_reward_loss
from megarl.algorithms.shaping import RewardNormaliser, clip_rewards, length_penalty, overlong_penalty
from megarl.algorithms.value_loss import value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "AdaptiveKl",
    "AdvantageInputs",
    "AdvantageOutputs",
    "LossSettings",
    "PolicyLoss",
    "PreferenceLoss",
    "PreferenceSettings",
    "Registry",
    "RewardNormaliser",
    "RunningMean",
    "clip_rewards",
    "correction",
    "kl_per_token",
    "kto",
    "kto_kl_reference",
    "length_penalty",
    "masked_whiten",
    "mismatch",
    "overlong_penalty",
    "pairwise_reward_loss",
    "process_reward_loss",
    "token_rewards",
    "token_weights",
    "value_loss",
]
