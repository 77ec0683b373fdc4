"""An environment of the `verifiers` package: two turns, and a rubric on the last one. Loaded by its name, as others are."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Twice(vf.MultiTurnEnv):
    """Asks again once."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Again."}]

    @vf.stop
    async def twice(self, state: Any, **_: Any) -> bool:
        return len(state["trajectory"]) >= 2


def right(completion: Any, answer: str, **_: Any) -> float:
    """Whether the last turn is the answer."""
    return float(completion[-1]["content"].strip() == answer)


def load_environment(high: int = 10) -> vf.Environment:
    """The environment, with `high` rows."""
    data = Dataset.from_list([{"question": f"Say {number}.", "answer": str(number)} for number in range(high)])
    return Twice(dataset=data, rubric=vf.Rubric(funcs=[right], weights=[0.5]), max_turns=3)
