"""A source of reward that fails on a response: `rewards[].on_error` says what a run does, within bounds, and everything is
counted. A run whose sources all have `on_error: stop` has nothing of this.

Steps of a run and evaluations go on. Whoever else has samples judged, such as a loop of the user's own, is told of each
failure.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.sections import RewardConfig
from megarl.data.sample import Sample
from megarl.errors import RewardError, RewardServerError, counted
from megarl.rewards.scorer import Outcome, Scorer, Verdict
from megarl.system.redaction import redacted

LONGEST_TRACEBACK = 8000
"""Characters of a traceback that are kept, of its end."""
SAMPLES_NAMED = 20
"""Samples that a record of failures names at most."""


@dataclass
class _Round:
    """The responses of a step or an evaluation: how many each source was asked about, and on how many it failed."""

    kind: Literal["step", "evaluation"]
    step: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)


class Tolerance:
    """Failures that the sources of a run are forgiven. `totals` counts those in steps, by label, since the run began."""

    def __init__(self, configs: Mapping[str, RewardConfig]) -> None:
        """`configs`: by label of a source."""
        self._configs = configs
        self.totals = dict.fromkeys(configs, 0)
        self._step = _Round("step", -1)
        self._round: _Round | None = None
        self._traced: set[str] = set()
        self._records: list[dict[str, Any]] = []

    @property
    def dropped(self) -> set[str]:
        """Ids of the groups that are to be left out of the step."""
        return self._step.dropped

    def begin_step(self, step: int) -> None:
        """Judge responses of the training step that comes after `step` others from now on; more of the same step add up."""
        if self._step.step != step:
            self._step = _Round("step", step)
        self._round = self._step

    @contextmanager
    def evaluating(self) -> Iterator[Mapping[str, int]]:
        """Judge the responses of an evaluation in this block: one that a source fails on counts as wrong.

        The value is the number of failures by label.
        """
        outside, inside = self._round, _Round("evaluation")
        self._round = inside
        try:
            yield inside.errors
        finally:
            self._round = outside

    def forgives(self, label: str) -> bool:
        """Return whether a failure of the source does not end the run now."""
        config, now = self._configs[label], self._round
        if now is None or config.on_error == "stop":
            return False
        return now.kind == "evaluation" or now.step >= config.strict_steps

    def judged(
        self, label: str, scorer: Scorer, samples: Sequence[Sample], ask: Callable[[], Sequence[Outcome]]
    ) -> list[Verdict]:
        """The verdicts of a source that is forgiven; 0 where it failed.

        Args:
            label: of the source.
            scorer: the source.
            samples: those to be judged, in order.
            ask: asks the scorer about them; what it raises is a failure on all of them.

        Raises:
            RewardError: it failed on a larger share of the round's responses than `max_error_share`.
        """
        now = self._round
        assert now is not None, "nothing is forgiven outside of steps and evaluations"
        scorer.keeps_errors = True
        try:
            outcomes = ask()
        except Exception as error:  # noqa: BLE001 - a source may raise anything
            outcomes = [error] * len(samples)
        finally:
            scorer.keeps_errors = False
        failed = [
            (sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True) if isinstance(outcome, Exception)
        ]
        now.asked[label] = now.asked.get(label, 0) + len(samples)
        now.errors[label] = now.errors.get(label, 0) + len(failed)
        if failed:
            self._count(label, now, failed)
        return [0.0 if isinstance(outcome, Exception) else outcome for outcome in outcomes]

    def _count(self, label: str, now: _Round, failed: Sequence[tuple[Sample, Exception]]) -> None:
        """Count and record failures; raises as `judged`."""
        config, first = self._configs[label], failed[0][1]
        row: dict[str, Any] = {
            "reward": label,
            "on_error": config.on_error if now.kind == "step" else "zero",
            "while": now.kind,
            "errors": len(failed),
            "error": redacted(str(first)) or type(first).__name__,
            "samples": [sample.sample_id for sample, _ in failed[:SAMPLES_NAMED]],
        }
        if label not in self._traced:
            row["traceback"] = redacted("".join(traceback.format_exception(first)))[-LONGEST_TRACEBACK:]
            self._traced.add(label)
        self._records.append(row)
        if now.kind == "step":
            self.totals[label] += len(failed)
            now.dropped |= {sample.group_id for sample, _ in failed} if config.on_error == "drop_group" else set()
        errors, asked = now.errors[label], now.asked[label]
        if errors > config.max_error_share * asked:
            of = f"step {now.step + 1}" if now.kind == "step" else "an evaluation"
            kind = RewardServerError if isinstance(first, RewardServerError) else RewardError  # runs restart for a server
            raise kind(
                f"reward '{label}' failed on {errors} of {asked} responses of {of}, which is more than its max_error_share = "
                f"{config.max_error_share:g} allows; the first failure: {row['error']}"
            ) from first

    def load_totals(self, totals: Mapping[str, int]) -> None:
        """Count on from a checkpoint's `totals`; of sources that had failed by then there is a traceback already."""
        self.totals |= {label: totals[label] for label in self.totals if label in totals}
        self._traced |= {label for label, errors in self.totals.items() if errors}

    def take_records(self, say: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
        """Take the records of calls with failures since the last time.

        The first one of a source has its traceback, and `say` is told of it.
        """
        taken, self._records = self._records, []
        for record in (record for record in taken if "traceback" in record):
            what = "left out with their groups" if record["on_error"] == "drop_group" else "counted as 0"
            how_many = counted(record["errors"], "response")
            say(f"reward '{record['reward']}' failed on {how_many}, {what}; the first error: {record['error']}")
        return taken

    def step_figures(self) -> dict[str, float]:
        """Give the metrics of the last step: failures in all and by source, those of the run so far, and groups left out."""
        errors = self._step.errors
        return {
            "reward/errors": sum(errors.values()),
            **{f"reward/errors/{name}": errors.get(label, 0) for label, name in metric_names([*self._configs]).items()},
            "reward/errors_so_far": sum(self.totals.values()),
            "reward/dropped_groups": len(self._step.dropped),
        }


def metric_names(labels: Sequence[str]) -> dict[str, str]:
    """Names of sources in metrics: of a file without its folders, `own.py_judge`, unless two have that name."""
    short = {label: re.sub(r"[^\w.-]+", "_", label.rpartition("/")[2]) for label in labels}
    whole = {label: re.sub(r"[^\w.-]+", "_", label) for label in labels}
    return {label: name if [*short.values()].count(name) == 1 else whole[label] for label, name in short.items()}
