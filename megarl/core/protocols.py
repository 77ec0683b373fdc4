"""The rollout side of a run as the loops see it, what was read for a run, and how both sides are started.

`workers/rollouts.py` and `trainers/rl` have them. The training side, which every run has, is in `runs/training_side.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.config import Config
from megarl.config.evaluations import EvaluationConfig
from megarl.data.sample import Prompt, RolloutBatch, Sample
from megarl.experience.inputs import RlInputs
from megarl.observe.run_state import EngineStatus
from megarl.observe.trace import Span
from megarl.runs.recovery import Recovery
from megarl.runs.training_side import TrainingSide

NextPrompts = Callable[[int], list[Prompt]]
"""Gives the next prompts, as many as it is asked for."""


class RolloutSide(Protocol):
    """The engines of a run: prompts in, samples out, under a known version of the policy."""

    stale: bool
    """Set by whoever changes the policy, cleared by `update_weights`."""
    version: int
    """Version of the policy whose weights the engines have, or are being given."""
    takes_turns: bool
    """Whether engines sleep while the trainer works."""

    def next_batch(self, next_prompts: NextPrompts, groups: int | None = None) -> RolloutBatch:
        """A step's groups of responses (None: `prompts_per_step`), trained under `version`; prompts are drawn as needed."""
        ...

    def finish_step_ahead(self, next_prompts: NextPrompts) -> None:
        """Before an update: wait for the responses of the next step, where none may span two versions."""
        ...

    def update_weights(self) -> None:
        """Give every engine the policy under a new version; the engines check every tensor they receive."""
        ...

    def generate(self, prompts: Sequence[Prompt], *, greedy: bool = False) -> list[Sample]:
        """`samples_per_prompt` responses to each prompt, or the single greedy one, grouped by prompt in order."""
        ...

    def sample(self, prompts: Sequence[Prompt], settings: EvaluationConfig) -> list[Sample]:
        """The responses that an evaluation set asks for, grouped by prompt in order."""
        ...

    def prompt(self, row: dict[str, Any], name: str) -> Prompt:
        """Make the prompt that `row` has under `data.prompt_key`, a text or chat messages; its row id begins with `name`."""
        ...

    def answer(self, prompts: Sequence[Prompt], n: int, **sampling: Any) -> list[Sample]:
        """`n` responses to each prompt; `sampling` replaces what the section `rollout` says, where it is not None."""
        ...

    def resume_after(self, version: int, groups: dict[str, Any] | None) -> None:
        """Continue where the engines had `version` and `state()` was `groups` (None: nothing was under way)."""
        ...

    def state(self) -> dict[str, Any]:
        """The prompts that were drawn and have not been trained on, JSON-able."""
        ...

    def figures(self) -> dict[str, float]:
        """Metrics of the batches taken since the last call."""
        ...

    def take_sent_bytes(self) -> int:
        """Bytes of weights sent since the last call."""
        ...

    def take_figures_of_turns(self) -> dict[str, float]:
        """Metrics since the last call of the turns that engines take with the trainer."""
        ...

    def take_spans(self) -> list[list[Span]]:
        """By engine what it did since the last call."""
        ...

    def progress(self) -> tuple[int, int]:
        """Groups that are finished of those that are due, and these; another thread may ask."""
        ...

    def answered(self) -> tuple[int, int]:
        """Counts of the prompts that were asked last outside batches: those that are answered, and all."""
        ...

    def engine_status(self) -> list[EngineStatus]:
        """The activity of every engine; another thread may ask."""
        ...


class Placed(Protocol):
    """The places of ranks and engines, as `weights/placement.py` decides them."""

    @property
    def gpu_count(self) -> int:
        """GPUs of the run."""
        ...

    def summary(self) -> str:
        """Describe it in one line."""
        ...

    def as_json(self) -> dict[str, Any]:
        """All of it, for `placement.json`."""
        ...


@dataclass(frozen=True)
class Processes:
    """The two sides of a run, once they are started, the name of their platform, and what replaces lost ranks."""

    roles: TrainingSide
    rollouts: RolloutSide
    platform: str
    recovery: Recovery | None = None


class StartProcesses(Protocol):
    """Starts ranks and engines of a config; what ends them is put on a stack."""

    def __call__(
        self,
        config: Config,
        inputs: RlInputs,
        stack: ExitStack,
        logs: str | Path,
        *,
        doing: Callable[[str], None],
        say: Callable[[str], None] | None,
        placed: Callable[[Placed], None],
    ) -> Processes:
        """`logs`: folder of the processes' logs. `doing` is told what is being started, `say` of engines that fail, and
        `placed` where everything is."""
        ...
