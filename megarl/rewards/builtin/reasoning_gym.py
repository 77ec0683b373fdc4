"""`reasoning_gym`: the score that a row's own task gives to the answer, between 0 and 1.

The answer is the text of the last `<answer>...</answer>`, or else the whole stripped response. Some tasks evaluate it
as Python, so each answer is judged in a confined process of its own, where literals and formulas alone are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.final_answer import extract_answer
from megarl.data.rows import DataSource
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError, nearest
from megarl.rewards.sandbox.judge_pool import ChildPool, Question
from megarl.rewards.scorer import Verdict


class ReasoningGymTask:
    """The verifier over rows whose `data_source` is a task; tasks are set up with the arguments the rows were made with."""

    keeps_errors, judges_apart = False, True

    def __init__(self, sources: Mapping[str, DataSource], *, timeout_s: float = 5.0) -> None:
        """Args:
        sources: where rows come from, by what their ids begin with (`train`, `eval`).
        timeout_s: given to one answer; one that takes longer is not judged, which is counted like a failure.
        """
        self._arguments = _arguments_by_rows(sources)
        self._children = ChildPool("reasoning_gym", timeout_s)

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """The tasks' scores, or None where a task fails on the answer or takes too long.

        Raises:
            RewardError: a row is of no task.
        """
        return self._children.judge([self._question(sample) for sample in samples], until)

    def check(self, prompt: Prompt) -> None:
        """Refuse a row that is of no task."""
        _task(prompt)

    def _question(self, sample: Sample) -> Question:
        task = _task(sample)
        arguments = self._arguments.get(sample.row_id.rpartition("-")[0], {}).get(task, {})
        return (task, arguments, sample.row), extract_answer(sample.response_text)


def _arguments_by_rows(sources: Mapping[str, DataSource]) -> dict[str, dict[str, dict[str, Any]]]:
    """The arguments of each task, by what the ids of its rows begin with; those of a mixture's parts have a number too."""
    by_rows: dict[str, dict[str, dict[str, Any]]] = {}
    for prefix, source in sources.items():
        for number, part in enumerate(source.parts or (source,)):
            for rows in (prefix, f"{prefix}-{number}"):
                by_rows.setdefault(rows, {}).setdefault(str(part.name), part.args)
    return by_rows


def _task(of: Sample | Prompt) -> str:
    from reasoning_gym.factory import DATASETS

    task = str(of.row.get("data_source", ""))
    if task not in DATASETS:
        raise RewardError(
            f"reward 'reasoning_gym': row {of.row_id} has data_source '{task}'{nearest(task, DATASETS)}; it must be a "
            "reasoning_gym task"
        )
    return task
