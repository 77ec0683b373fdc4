"""Episodes in an environment of an OpenEnv server: the package's own where it is installed; one that speaks its protocol."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.data.sample import Sample
from megarl.errors import EpisodeError
from megarl.options.environments.section import OpenEnvConfig
from tests.data.chat_tokenizers import CHATML, byte_tokenizer, ids_of
from tests.rollout.episode_parts import PROMPT, Script, Settings, opened

pytestmark = pytest.mark.slow
TOKENIZER = byte_tokenizer(CHATML)
PYTHON = os.environ.get("MEGARL_OPENENV_PYTHON", sys.executable)
"""The Python of an environment that has openenv-core, which wants packages that megarl's must not have."""
HAS_PACKAGE = sys.executable != PYTHON or importlib.util.find_spec("openenv") is not None
NUMBER = zlib.crc32(PROMPT.row_id.encode()) % 10


@pytest.fixture(scope="module", params=["package", "protocol"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "package" and not HAS_PACKAGE:
        pytest.skip("openenv-core is not installed; MEGARL_OPENENV_PYTHON may name a Python that has it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(Path(__file__).with_name("openenv_server.py"))
    python = PYTHON if request.param == "package" else sys.executable
    process = subprocess.Popen([python, program, str(port), request.param], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def acted(url: str, *turns: str, row: dict[str, object] | None = None, times: int = 1, **settings: object) -> list[Sample]:
    config = OpenEnvConfig(url=url, **settings)  # type: ignore[arg-type]
    episode, context = opened(
        TOKENIZER, Settings(kind="environment", tools=(), openenv=config, tool_timeout_s=30), max_prompt_tokens=500
    )
    prompt = replace(PROMPT, row=row or {})

    async def scenario() -> list[Sample]:
        scripts = [Script([(ids_of(turn, "<|end|>"), "stop") for turn in turns]) for _ in range(times)]
        samples = await asyncio.gather(*(episode(prompt, n, script, context) for n, script in enumerate(scripts)))
        return [sample for sample in samples if isinstance(sample, Sample)]

    return asyncio.run(scenario())


def test_an_episode_ends_when_the_environment_is_done_and_has_its_reward(url: str) -> None:
    [sample] = acted(url, str(NUMBER - 1), str(NUMBER + 1), str(NUMBER), "never said")
    assert "Guess a number below 10." in sample.prompt_text
    assert [turn["content"] for turn in sample.turns] == [str(NUMBER - 1), "higher", str(NUMBER + 1), "lower", str(NUMBER)]
    assert sample.rewards == {"environment": 1.0}
    assert sample.turn_rewards == [0.0, 0.0, 1.0]
    assert sample.finish_reason == "stop"


def test_arguments_of_a_row_reach_reset_and_actions_may_be_json(url: str) -> None:
    [sample] = acted(
        url, "no json", "[1]", '{"other": 1}', '{"message": "1"}',
        row={"game": {"seed": 1, "high": 2}}, reset_key="game", action_key=None, observation_key="text",
    )  # fmt: skip
    assert "Guess a number below 2." in sample.prompt_text
    told = [turn["content"] for turn in sample.turns if turn["role"] == "user"]
    assert told[0].startswith("error: an action must be a JSON object: ")
    assert told[1] == "error: an action must be a JSON object"
    assert told[2].startswith("error: ")
    assert sample.rewards == {"environment": 1.0}


def test_many_episodes_have_a_session_each(url: str) -> None:
    samples = acted(url, str(NUMBER - 1), str(NUMBER), times=20, at_once=4)
    assert [sample.rewards["environment"] for sample in samples] == [1.0] * 20


def test_an_environment_that_fails_or_is_not_there_is_named(url: str) -> None:
    with pytest.raises(EpisodeError, match=r"raised .*the server refused step: .*it broke \(EXECUTION_ERROR\)"):
        acted(url, "boom")
    with pytest.raises(EpisodeError, match=r"\(rollout.episode.openenv.url\) cannot be reached"):
        acted("http://127.0.0.1:9", "1")
    with pytest.raises(EpisodeError, match=r"an observation has no 'hint' \(rollout.episode.openenv.observation_key\)"):
        acted(url, "1", observation_key="hint")
    with pytest.raises(EpisodeError, match="'game' of row train-7 must be an object of arguments for reset"):
        acted(url, "1", reset_key="game")
