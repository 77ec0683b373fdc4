"""`environment`: what the environment or the agent of an episode gave; found in the sample, computed nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.scorer import Verdict


class EnvironmentReward:
    """The source of reward for `rollout.episode.kind: environment` and for agents that judge themselves."""

    def __init__(self, answer_key: str) -> None:
        pass

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """The reward that each sample brought along."""
        for sample in samples:
            if "environment" not in sample.rewards:
                raise RewardError(
                    f"reward 'environment': sample {sample.sample_id} brought no reward along; rollout.episode.kind must be "
                    "'environment', or 'agent' with an agent that returns a reward or posts one to its endpoint"
                )
        return [sample.rewards["environment"] for sample in samples]

    def check(self, prompt: Prompt) -> None:
        """What an environment needs of a row is its own business."""
