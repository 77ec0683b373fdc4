"""`reasoning_gym`: the score that a row's own task gives to the answer, between 0 and 1.

The answer is the text of the last `<answer>...</answer>`, or else the whole stripped response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarl.config.schema import DataConfig
from megarl.data.sample import Sample
from megarl.errors import RewardError, nearest
from megarl.rewards.scorer import Verdict

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class ReasoningGymTask:
    """The verifier over rows whose `data_source` is a task; tasks are set up with the arguments the rows were made with."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self._tasks: dict[tuple[str, str], Any] = {}

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """The tasks' scores, or None where a task fails on the answer."""
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> Verdict:
        task = self._task(sample)
        try:
            return float(task.score_answer(extract_answer(sample.response_text), sample.row))
        except Exception:  # noqa: BLE001 - some tasks raise on answers of an unexpected form; the failure is counted
            return None

    def _task(self, sample: Sample) -> Any:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS

        name = str(sample.row.get("data_source", ""))
        section = sample.row_id.rpartition("-")[0]
        if (section, name) not in self._tasks:
            if name not in DATASETS:
                raise RewardError(
                    f"reward 'reasoning_gym': row {sample.row_id} has data_source '{name}'{nearest(name, DATASETS)}, but it "
                    "must be a reasoning_gym task"
                )
            source = getattr(self.data, section, None)
            args = source.args if source is not None and source.name == name else {}
            self._tasks[section, name] = create_dataset(name, **args, seed=0, size=1)
        return self._tasks[section, name]


def extract_answer(response: str) -> str:
    """The text of the last `<answer>...</answer>`, or else the whole response, stripped."""
    tagged = _ANSWER.findall(response)
    return (tagged[-1] if tagged else response).strip()
