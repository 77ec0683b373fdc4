"""Lets an environment of the `verifiers` package act: its turns come from megarl's endpoint, its rubric gives the reward.

`rollout.episode.agent.verifiers` runs `solve` in processes of a Python that has `verifiers` (0.1) and the environment. That
need not be megarl's Python, whose SGLang wants another version of `openai`. As a program, `PYTHON -P verifiers_agent.py NAME
[ARGUMENTS]` writes the environment's rows, which become `data.train`, as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from functools import lru_cache
from typing import Any

VARIABLE = "MEGARL_VERIFIERS"
"""Has `{"environment", "arguments"}` as JSON."""


@lru_cache
def environment(setting: str) -> Any:
    """The environment that `setting` names, loaded once."""
    import verifiers

    named = json.loads(setting)
    return verifiers.load_environment(named["environment"], **named["arguments"])


async def solve(task: Any) -> float:
    """Let the environment act on one row; the reward of its rubric."""
    import openai
    from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

    row = {key: task.row[key] for key in ("prompt", "answer", "info", "example_id") if task.row.get(key) is not None}
    example = {"example_id": 0, "info": {}, **row}
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        acting = environment(os.environ[VARIABLE]).run_rollout(example, OpenAIChatCompletionsClient(client), task.model, {})
        output = await acting
    if output.get("error") and not output.get("trajectory") and not output.get("completion"):
        raise RuntimeError(f"the environment failed: {output['error']}")
    return float(output["reward"])


def rows(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an environment's data set."""
    dataset = environment(json.dumps({"environment": name, "arguments": arguments})).get_dataset()
    return [{key: row[key] for key in row if row[key] is not None} for row in dataset]


if __name__ == "__main__":
    for one in rows(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}):
        sys.stdout.write(json.dumps(one) + "\n")
