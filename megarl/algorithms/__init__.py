"""The maths of a step as pure functions on tensors: torch only, one process, no I/O.

The package itself imports without torch, so that the config can read `megarl.algorithms.catalogue`; the first name of the
maths that is asked for imports all of it, and so registers every estimator and loss. Those of preferences and reward models are
imported from their own modules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megarl.algorithms.catalogue import needs

if TYPE_CHECKING:
    from megarl.algorithms.advantages import (
        ADVANTAGES,
        AdvantageInputs,
        AdvantageOutputs,
        RunningMean,
        last_of_each_row,
        masked_whiten,
        normalised,
        token_rewards,
        turn_numbers,
    )
    from megarl.algorithms.aggregation import AGGREGATIONS, row_weights, token_weights
    from megarl.algorithms.entropy import AdaptiveEntropy
    from megarl.algorithms.kl import (
        K3_LIMIT,
        KL_ESTIMATORS,
        LOG_RATIO_LIMIT,
        AdaptiveKl,
        AdaptivePenalty,
        kl_per_token,
        log_ratio,
    )
    from megarl.algorithms.off_policy import CORRECTIONS, Correction, correction, mismatch_sums
    from megarl.algorithms.policy_losses import POLICY_LOSSES, LossSettings, PolicyLoss
    from megarl.algorithms.registry import Registry
    from megarl.algorithms.shaping import RewardNormaliser, aggregate_steps, clip_rewards, length_penalty, overlong_penalty
    from megarl.algorithms.shard import WHOLE, Shard
    from megarl.algorithms.token_choice import CHOICES, covariance, top_entropies
    from megarl.algorithms.token_losses import dft_loss, value_loss
    from megarl.algorithms.turn_advantages import rewards_of_turns

_MODULES = (
    "advantages", "token_advantages", "group_advantages", "subset_advantages", "token_baseline", "turn_advantages",
    "aggregation", "entropy", "kl", "off_policy", "policy_losses", "clipping_variants", "registry",
    "shaping", "shard", "token_choice", "token_losses",
)  # fmt: skip

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CHOICES",
    "CORRECTIONS",
    "K3_LIMIT",
    "KL_ESTIMATORS",
    "LOG_RATIO_LIMIT",
    "POLICY_LOSSES",
    "WHOLE",
    "AdaptiveEntropy",
    "AdaptiveKl",
    "AdaptivePenalty",
    "AdvantageInputs",
    "AdvantageOutputs",
    "Correction",
    "LossSettings",
    "PolicyLoss",
    "Registry",
    "RewardNormaliser",
    "RunningMean",
    "Shard",
    "aggregate_steps",
    "clip_rewards",
    "correction",
    "covariance",
    "dft_loss",
    "kl_per_token",
    "last_of_each_row",
    "length_penalty",
    "log_ratio",
    "masked_whiten",
    "mismatch_sums",
    "needs",
    "normalised",
    "overlong_penalty",
    "rewards_of_turns",
    "row_weights",
    "token_rewards",
    "token_weights",
    "top_entropies",
    "turn_numbers",
    "value_loss",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = [importlib.import_module(f"{__name__}.{module}") for module in _MODULES]
    home = next(module for module in modules if name in vars(module))
    globals()[name] = value = getattr(home, name)
    return value
