"""`reasoning_gym`: the score that a row's own task gives to the answer, between 0 and 1.

The answer is the text of the last `<answer>...</answer>`, or else the whole stripped response. Some tasks evaluate it
as Python, so it is judged in child processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarl.config.schema import DataConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError, nearest
from megarl.rewards.child_pool import ChildPool
from megarl.rewards.scorer import Verdict

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class ReasoningGymTask:
    """The verifier over rows whose `data_source` is a task; tasks are set up with the arguments the rows were made with."""

    def __init__(self, data: DataConfig, *, timeout_s: float = 5.0) -> None:
        """`timeout_s` is given to one answer; one that takes longer is not judged, which is counted like a failure."""
        self.data = data
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

    def _question(self, sample: Sample) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
        task = _task(sample)
        source = getattr(self.data, sample.row_id.rpartition("-")[0], None)
        arguments = source.args if source is not None and source.name == task else {}
        return task, arguments, extract_answer(sample.response_text), sample.row


def _task(of: Sample | Prompt) -> str:
    from reasoning_gym.factory import DATASETS

    task = str(of.row.get("data_source", ""))
    if task not in DATASETS:
        raise RewardError(
            f"reward 'reasoning_gym': row {of.row_id} has data_source '{task}'{nearest(task, DATASETS)}, but it must be a "
            "reasoning_gym task"
        )
    return task


def extract_answer(response: str) -> str:
    """The text of the last `<answer>...</answer>`, or else the whole response, stripped."""
    tagged = _ANSWER.findall(response)
    return (tagged[-1] if tagged else response).strip()
