"""Rewards of samples from functions of the user and from verifiers of the answer; several add up with weights.

A source that fails is an error, never a reward; a verifier that cannot judge gives 0 and is counted per data row. Those that
megarl has are imported with `build_rewards`, when it is first asked for: who has sources of reward needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.rewards.sources import RewardSources

if TYPE_CHECKING:
    from megarl.rewards.catalogue import build_rewards

__all__ = ["RewardSources", "build_rewards"]


def __getattr__(name: str) -> Any:
    if name != "build_rewards":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megarl.rewards.catalogue import build_rewards

    return build_rewards
