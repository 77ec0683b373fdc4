"""Environments of the `verifiers` package act over the endpoint, and their rubric's reward is the episode's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Prompt
from megarl.errors import EpisodeError
from megarl.options.agents import verifiers_agent
from megarl.options.agents.section import AgentConfig, VerifiersConfig
from megarl.rollout.engines.protocol import Generation
from megarl.rollout.episodes import open_episodes
from tests.data.chat_tokenizers import CHATML, byte_tokenizer, ids_of
from tests.rollout.episode_parts import Settings

PYTHON = os.environ.get("MEGARL_VERIFIERS_PYTHON", sys.executable)
"""The Python of an environment that has verifiers 0.1, which wants packages that megarl's must not have."""
pytestmark = pytest.mark.slow
TOKENIZER = byte_tokenizer(CHATML)
needs_verifiers = pytest.mark.skipif(
    sys.executable == PYTHON and importlib.util.find_spec("verifiers") is None,
    reason="verifiers is not installed; MEGARL_VERIFIERS_PYTHON may name a Python that has it",
)


def opened(**verifiers: Any) -> Any:
    data = DataConfig(train=SourceConfig(name="chain_sum"), max_prompt_tokens=1000)
    agent = AgentConfig(verifiers=VerifiersConfig(**verifiers), timeout_s=100)
    return open_episodes(Settings(kind="agent", tools=(), agent=agent), data, TOKENIZER, 2000)


@needs_verifiers
def test_rows_of_an_environment_are_acted_on_and_rewarded_by_its_rubric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    argv = [PYTHON, "-P", verifiers_agent.__file__, "verifiers_environment", '{"high": 3}']
    written = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout
    rows = [json.loads(line) for line in written.splitlines()]
    assert [row["answer"] for row in rows] == ["0", "1", "2"]
    assert rows[1]["prompt"] == [{"role": "user", "content": "Say 1."}]

    async def say(ids: list[int], most: int, media: Any = None, /) -> Generation:
        said = ids_of("1", "<|end|>")
        return Generation(said, [-0.5] * len(said), [3] * len(said), "stop")

    async def scenario() -> list[Any]:
        prompts = [Prompt(f"train-{n}", f"train-{n}@0", [1], "", row) for n, row in enumerate(rows)]
        return await asyncio.gather(*(episodes.branches(prompt, 0, say) for prompt in prompts))

    episodes = opened(environment="verifiers_environment", arguments={"high": 3}, python=PYTHON)
    try:
        made = asyncio.run(scenario())
    finally:
        episodes.close()
    assert [len(branches) for branches in made] == [1, 1, 1]
    assert [branches[0].rewards["environment"] for branches in made] == [0.0, 0.5, 0.0]
    for [sample] in made:
        assert [turn["content"] for turn in sample.turns] == ["1", "Again.", "1"]
        assert sample.finish_reason == "stop"


@needs_verifiers
def test_an_environment_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = opened(environment="no-such-environment", python=PYTHON)
    try:
        with pytest.raises(EpisodeError, match=r"(?s)ended 3 times on row train-0 .*no.such.environment"):
            asyncio.run(episodes.branches(Prompt("train-0", "train-0@0", [1], "", {"prompt": []}), 0, None))
    finally:
        episodes.close()


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(EpisodeError, match=r"rollout.episode.agent.verifiers.python is '/no/python', which is no program"):
        opened(environment="x", python="/no/python")
