"""The user's inputs for reinforcement learning as the loops have them; `trainers/inputs.py` reads them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.config.evaluations import EvaluationConfig
from megarl.data.sample import Prompt, Sample
from megarl.experience.eval_figures import evaluation, set_figures
from megarl.experience.step_parts import StepPart
from megarl.rewards.sources import RewardSources


class OpenedEpisodes(Protocol):
    """Episodes of a kind that has turns; `rollout/episodes` opens and runs them."""

    @property
    def tool_schemas(self) -> Sequence[Any]:
        """The schemas of tools, which prompts show the model."""
        ...

    @property
    def choices(self) -> Sequence[str]:
        """Lines that say what was chosen for the user, for the start of a run."""
        ...

    def branches(self, prompt: Prompt, number: int, sample: Any, /) -> Awaitable[list[Sample]]:
        """Episode `number` of the group that `prompt` names: its branches, which is one of it but for agents."""
        ...

    def take_counts(self) -> dict[str, int]:
        """Counts of events since the last call."""
        ...

    def close(self) -> None:
        """End what was started for them, such as the processes of tools."""
        ...


@dataclass(frozen=True)
class EvaluationSet:
    """A named set as it is asked and judged."""

    settings: EvaluationConfig
    prompts: list[Prompt]
    rewards: RewardSources


@dataclass(frozen=True)
class RlInputs:
    """The tokenizer, the prompts and what judges responses to them; `close` when the run ends."""

    tokenizer: Any
    episodes: OpenedEpisodes | None
    """None where every response is a single turn."""
    train: list[list[Prompt]]
    """By part of the mixture, without those that are held out."""
    held_out: list[Prompt]
    """Those of `data.eval`."""
    evaluations: list[EvaluationSet]
    train_rows: int
    """Rows of all parts before those were left out that are in `data.eval` or `evaluations`, too."""
    dropped: dict[str, int]
    """Rows, of all sets, that were left out because they do not fit, by the reason."""
    rewards: RewardSources
    parts: list[StepPart]
    """Those that options take in a training step."""
    dense_layers: int | None = None
    """Layers of the policy, where it has no experts and a CPU computes it."""

    @property
    def overlap(self) -> int:
        """Training rows that were left out because they are held out."""
        return self.train_rows - sum(map(len, self.train))

    def measure_held_out(self, samples: Sequence[Sample], judge: Callable[[list[Sample]], list[float]]) -> dict[str, float]:
        """The figures of `data.eval` (`evaluation`); `judge` gives rewards of the `samples` that answer it."""
        with self.rewards.evaluating() as of_errors:
            rewards = judge([*samples])
        return evaluation(samples, rewards) | of_errors

    def measure_sets(self, sample: Callable[[Sequence[Prompt], EvaluationConfig], list[Sample]]) -> dict[str, float]:
        """The figures of every set of `evaluations` (`set_figures`), as `NAME/figure`; `sample` answers prompts."""
        figures: dict[str, float] = {}
        for one in self.evaluations:
            samples = sample(one.prompts, one.settings)
            with one.rewards.evaluating() as of_errors:
                rewards = one.rewards.score(samples)
            measured = set_figures(
                samples,
                rewards,
                samples_per_prompt=one.settings.samples_per_prompt,
                source_key=one.settings.source_key,
                final_answer=one.rewards.final_answer,
            )
            measured |= of_errors
            figures |= {f"{one.settings.name}/{name}": value for name, value in measured.items()}
        return figures

    @property
    def forgives_rewards(self) -> bool:
        """Return whether some source of reward may fail without ending the run."""
        return any(sources.tolerance is not None for sources in self._all_rewards)

    @property
    def _all_rewards(self) -> list[RewardSources]:
        return [self.rewards, *(one.rewards for one in self.evaluations)]

    def take_reward_errors(self, say: Callable[[str], None]) -> list[dict[str, Any]]:
        """Take the records of responses that a source of reward failed on since the last time, those of evaluations too.

        `say` is told of the first ones of each source.
        """
        tolerances = [sources.tolerance for sources in self._all_rewards if sources.tolerance is not None]
        return [record for tolerance in tolerances for record in tolerance.take_records(say)]

    def close(self) -> None:
        """End what episodes started, such as the processes of tools."""
        if self.episodes is not None:
            self.episodes.close()
