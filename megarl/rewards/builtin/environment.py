"""`environment`: what the environment of an episode gave, all its steps together; found in the sample, computed nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.scorer import Verdict


class EnvironmentReward:
    """The source of reward for `rollout.episode.kind: environment`."""

    def __init__(self, answer_key: str) -> None:
        pass

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """The reward that each sample brought along."""
        for sample in samples:
            if "environment" not in sample.rewards:
                raise RewardError(
                    f"reward 'environment': sample {sample.sample_id} comes from no environment; rollout.episode.kind must be "
                    "'environment'"
                )
        return [sample.rewards["environment"] for sample in samples]

    def check(self, prompt: Prompt) -> None:
        """What an environment needs of a row is its own business."""
