"""All sources of reward of a run behind one `score`, which has a deadline and says who missed it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.config.sections import RewardConfig, reward_labels
from megarl.data.final_answer import extract_answer
from megarl.data.sample import Prompt, Sample
from megarl.rewards.asking import VerdictsAhead, outcomes_of
from megarl.rewards.scorer import Outcome, Scorer, StatesAnswers

if TYPE_CHECKING:
    from megarl.rewards.tolerance import Tolerance

SCORED_S = 600.0
"""For the samples of a step, by all sources together, if nothing else is said (`rollout.deadlines.reward_s`)."""


class RewardSources:
    """The weighted sum of sources of reward.

    `failures` counts, per `row_id`, the samples that a verifier could not judge; each got 0 from it. A source that fails
    raises, unless there is a `tolerance`.
    """

    def __init__(self, sources: Sequence[tuple[str, float, Scorer]], deadline_s: float = SCORED_S) -> None:
        """`sources`: label, weight and scorer of each. `deadline_s`: for the samples of a step, by all sources together."""
        self.sources, self.deadline_s = list(sources), deadline_s
        self._ahead: dict[str, VerdictsAhead] = {}
        self.failures: dict[str, int] = {}
        self.tolerance: Tolerance | None = None

    def tolerate(self, configs: Sequence[RewardConfig]) -> None:
        """Go on after failures as the sources' `on_error` says; `configs` are those that they were built of."""
        if any(config.on_error != "stop" for config in configs):
            from megarl.rewards.tolerance import Tolerance

            labels = reward_labels([config.name for config in configs])
            self.tolerance = Tolerance(dict(zip(labels, configs, strict=True)))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Look at every data row before a run starts.

        Raises:
            RewardError: a source could score no response to one of `prompts`, as its row lacks what the source compares with.
        """
        for _, _, scorer in self.sources:
            for prompt in prompts:
                scorer.check(prompt)

    def final_answer(self, response: str) -> str | None:
        """The answer of a response, as the first source sees it that reads answers; else its `<answer>` or its whole text."""
        for _, _, scorer in self.sources:
            if isinstance(scorer, StatesAnswers):
                return scorer.final_answer(response)
        return extract_answer(response) or None

    def begin(self, samples: Sequence[Sample], *, by_branch: bool) -> None:
        """Have sources that judge each sample apart judge those of a finished group, while others are sampled; in any thread.

        `by_branch`: each branch of an episode has a reward of its own.
        """
        judged = [sample for sample in samples if by_branch or not sample.branch_of]
        for label, _, scorer in self.sources:
            if scorer.judges_apart:
                if label not in self._ahead:
                    self._ahead[label] = VerdictsAhead(label, scorer, self.deadline_s)
                self._ahead[label].begin(judged)

    def score(self, samples: list[Sample], deadline_s: float | None = None) -> list[float]:
        """One reward per sample, in order; what each source gave is left in `sample.rewards` under its label.

        Args:
            samples: finished samples.
            deadline_s: seconds for all sources together; None: `self.deadline_s`. Verifiers stop a little before: what they
                have not judged by then counts as not judged.

        Raises:
            RewardError: a source failed, gave no finite numbers, or the deadline passed while it worked, and its `on_error`
                does not say to go on.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        totals = [0.0] * len(samples)
        if not samples:
            return totals
        for label, weight, scorer in self.sources:
            of = partial(outcomes_of, scorer, until, label, deadline_s)
            ask = partial(self._ahead[label].outcomes, samples, until, of) if label in self._ahead else partial(of, samples)
            if self.tolerance is not None and self.tolerance.forgives(label):
                outcomes: Sequence[Outcome] = self.tolerance.judged(label, scorer, samples, ask)
            else:
                outcomes = ask()
            for index, (sample, verdict) in enumerate(zip(samples, outcomes, strict=True)):
                if isinstance(verdict, Exception):
                    raise verdict
                if verdict is None:
                    self.failures[sample.row_id] = self.failures.get(sample.row_id, 0) + 1
                sample.rewards[label] = reward = 0.0 if verdict is None else verdict
                totals[index] += weight * reward
        return totals

    def take_ahead(self) -> int:
        """Count of the verdicts since the last call that were there when they were asked for."""
        return sum(ahead.take_count() for ahead in self._ahead.values())

    @contextmanager
    def evaluating(self) -> Iterator[dict[str, float]]:
        """Judge the responses of an evaluation in this block; afterwards the value has its figures of sources that failed."""
        figures: dict[str, float] = {}
        if self.tolerance is None:
            yield figures
            return
        with self.tolerance.evaluating() as errors:
            yield figures
        figures["errors"] = sum(errors.values())

    def state_dict(self) -> dict[str, Any]:
        """Counts for a checkpoint, JSON-able."""
        return {"errors": dict(self.tolerance.totals)} if self.tolerance is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from `state_dict()`'s answer."""
        if self.tolerance is not None:
            self.tolerance.load_totals(state.get("errors", {}))
