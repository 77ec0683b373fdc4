"""`environment`: what the environment or the agent of an episode gave; found in the sample, computed nowhere."""

from __future__ import annotations

from megarl.data.sample import Prompt, Sample
from megarl.rewards.scorer import Verdict, Verifier


class EnvironmentReward(Verifier):
    """The source of reward for `rollout.episode.kind: environment` and for agents that judge themselves."""

    name = "environment"

    def judge(self, sample: Sample) -> Verdict:
        """The reward that the sample brought along."""
        if self.name not in sample.rewards:
            raise self.error(
                f"sample {sample.sample_id} brought no reward along; rollout.episode.kind must be "
                "'environment', or 'agent' with an agent that returns a reward or posts one to its endpoint"
            )
        return sample.rewards[self.name]

    def check(self, prompt: Prompt) -> None:
        """What an environment needs of a row is its own business."""
