"""Rewards of samples from functions of the user and from verifiers of the answer; several add up with weights.

A source that fails is an error, never a reward; a verifier that cannot judge gives 0 and is counted per data row.
"""

from megarl.rewards.sources import RewardSources, build_rewards

__all__ = ["RewardSources", "build_rewards"]
