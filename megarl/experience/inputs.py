"""The user's inputs for reinforcement learning as the loops have them; `trainers/inputs.py` reads them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.config.evaluations import EvaluationConfig
from megarl.data.sample import Prompt, Sample
from megarl.experience.eval_figures import set_figures
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

    def measure_sets(self, sample: Callable[[Sequence[Prompt], EvaluationConfig], list[Sample]]) -> dict[str, float]:
        """The figures of every set of `evaluations` (`set_figures`), as `NAME/figure`; `sample` answers prompts."""
        figures: dict[str, float] = {}
        for evaluation in self.evaluations:
            samples = sample(evaluation.prompts, evaluation.settings)
            measured = set_figures(
                samples,
                evaluation.rewards.score(samples),
                samples_per_prompt=evaluation.settings.samples_per_prompt,
                source_key=evaluation.settings.source_key,
                final_answer=evaluation.rewards.final_answer,
            )
            figures |= {f"{evaluation.settings.name}/{name}": value for name, value in measured.items()}
        return figures

    def close(self) -> None:
        """End what episodes started, such as the processes of tools."""
        if self.episodes is not None:
            self.episodes.close()
