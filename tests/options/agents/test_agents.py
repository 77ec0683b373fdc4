"""Agents in processes of their own, over the real endpoint and the public `openai` package: what they leave, and what ends
them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import psutil
import pytest

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import EngineError, EpisodeError
from megarl.options.agents.section import AgentConfig
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.episodes import Episodes, open_episodes
from megarl.rollout.scheduling.episode_requests import episode_groups
from tests.data.chat_tokenizers import CHATML, byte_tokenizer, ids_of
from tests.rollout.episode_parts import Settings

HERE = "tests.options.agents.agent_parts"
TOKENIZER, END = byte_tokenizer(CHATML), ids_of("<|end|>")[0]
PROMPT = Prompt("train-7", "train-7@2", [1], "a prompt", {"question": "what is it?", "answer": 4})
SCRIPT = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
assert task["row"]["answer"] == 4 and task["prompt"] == "what is it?"
assert os.environ["OPENAI_API_KEY"] == task["api_key"] and "SECRET" not in os.environ and os.environ["PASSED"] == "yes"
assert os.getcwd() == os.environ["HOME"] and sys.argv[1:] == ["what is it?", "4", "{other}"], sys.argv
open("scratch", "w").write("left behind")

def post(path, body):
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(asked))

said = post("/chat/completions", {"model": "megarl", "messages": [{"role": "user", "content": "hello"}]})
post("/reward", {"reward": 0.25})
if os.fork() == 0:  # a child that stays
    import time
    os.setsid()
    time.sleep(600)
print("bye")
"""


def opened(settings: AgentConfig, max_turns: int = 8, max_new_tokens: int = 1000) -> Episodes:
    config = DataConfig(train=SourceConfig(name="chain_sum"), max_prompt_tokens=1000)
    episode = Settings(kind="agent", tools=(), max_turns=max_turns)
    episode.agent = settings
    return open_episodes(episode, config, TOKENIZER, max_new_tokens)


async def hello(ids: list[int], most: int, media: Any = None, /) -> Generation:
    said = [*TOKENIZER("hi", add_special_tokens=False)["input_ids"], END][:most]
    return Generation(said, [-0.5] * len(said), [3] * len(said), "stop")


def acted(episodes: Episodes, sample: Any = hello, times: int = 1) -> list[list[Sample]]:
    async def scenario() -> list[list[Sample]]:
        return await asyncio.gather(*(episodes.branches(PROMPT, number, sample) for number in range(times)))

    try:
        return asyncio.run(scenario())
    finally:
        episodes.close()


def test_many_episodes_of_a_function_act_at_once_in_one_process() -> None:
    episodes = opened(AgentConfig(function=f"{HERE}:two_turns", processes=1))
    for number, branches in enumerate(acted(episodes, times=12)):
        [sample] = branches
        assert sample.sample_id == f"train-7@2/{number}"
        assert sample.rewards == {"environment": len("what is it?")}
        assert [turn["role"] for turn in sample.turns] == ["assistant", "user", "assistant"]
        assert sample.sampled_mask.count(1) == 2 * len(ids_of("hi", "<|end|>"))
        assert sample.finish_reason == "stop"
    assert episodes.take_counts()["turns"] == 24


def test_a_command_gets_its_task_and_what_it_needs_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "agent.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("PASSED", "yes")
    command = (sys.executable, str(script), "{prompt}", "{row.answer}", "{other}")
    before = {*Path("/tmp").glob("megarl-agent-*")}
    [[sample]] = acted(opened(AgentConfig(command=command, pass_environment=("PASSED",))))
    assert sample.rewards == {"environment": 0.25}
    assert sample.finish_reason == "stop"
    assert {*Path("/tmp").glob("megarl-agent-*")} <= before
    time.sleep(0.2)
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(script) in (process.info["cmdline"] or [])]


def test_a_streamed_turn_of_a_plain_function() -> None:
    [[sample]] = acted(opened(AgentConfig(function=f"{HERE}:one_turn", processes=1)))
    assert sample.response_text == "hi"
    assert sample.rewards == {}


def test_an_agent_that_never_ends_is_ended_and_its_turns_are_kept_as_truncated() -> None:
    episodes = opened(AgentConfig(function=f"{HERE}:never_ends", processes=1, timeout_s=6))
    agents = psutil.Process().children()
    try:
        [sample] = asyncio.run(episodes.branches(PROMPT, 0, hello))
        left = [one for one in psutil.Process().children() if one not in agents and one.status() != psutil.STATUS_ZOMBIE]
        assert left == [], "it does not heed that it is cancelled, and so its process is ended"
    finally:
        episodes.close()
    assert sample.finish_reason == "length"
    assert len(sample.turns) == 3
    assert episodes.take_counts()["agent_timeouts"] == 1


def test_an_agent_that_is_out_of_time_is_ended_when_the_turn_that_it_waits_for_is_there() -> None:
    async def slow_hello(ids: list[int], most: int, media: Any = None, /) -> Generation:
        await asyncio.sleep(5)
        return await hello(ids, most)

    [[sample]] = acted(opened(AgentConfig(function=f"{HERE}:two_turns", processes=1, timeout_s=3)), slow_hello)
    assert (sample.finish_reason, sample.response_text) == ("length", "hi")


def test_an_episode_that_is_out_of_time_as_an_engine_hangs_is_begun_anew() -> None:
    async def hangs(ids: list[int], most: int, media: Any = None, /) -> Generation:
        await asyncio.sleep(5)
        raise EngineError("it did not answer")

    with pytest.raises(EngineError, match="it did not answer"):
        acted(opened(AgentConfig(function=f"{HERE}:two_turns", processes=1, timeout_s=3)), hangs)


def test_an_agent_that_floods_is_ended() -> None:
    episodes = opened(AgentConfig(function=f"{HERE}:floods", processes=1, timeout_s=60), max_turns=2)
    started = time.monotonic()
    [branches] = acted(episodes)
    assert time.monotonic() - started < 40
    assert len(branches) == 2, "it asked the same twice: two answers"
    assert branches[0].finish_reason == "length"
    assert episodes.take_counts()["floods"] == 1


def test_an_agent_whose_process_dies_is_begun_anew_with_the_turns_that_were_sampled_for_it(tmp_path: Path) -> None:
    episodes, asked = opened(AgentConfig(function=f"{HERE}:dies_once", processes=1)), []
    prompt = replace(PROMPT, row={**PROMPT.row, "marker": str(tmp_path / "died")})

    async def counted(ids: list[int], most: int, media: Any = None, /) -> Generation:
        asked.append(ids)
        return await hello(ids, most)

    try:
        [sample] = asyncio.run(episodes.branches(prompt, 0, counted))
    finally:
        episodes.close()
    assert (tmp_path / "died").exists()
    assert sample.rewards["environment"] > 0
    assert sample.finish_reason == "stop"
    assert len(asked) == 2
    assert episodes.take_counts()["agent_errors"] == 0


def test_an_agent_that_dies_leaves_its_turns_which_are_sampled_once() -> None:
    episodes, asked = opened(AgentConfig(function=f"{HERE}:dies", processes=1)), []

    async def counted(ids: list[int], most: int, media: Any = None, /) -> Generation:
        asked.append(ids)
        return await hello(ids, most)

    [[sample]] = acted(episodes, counted)
    assert len(asked) == 2, "its three tries asked the same"
    assert len(sample.turns) == 3
    assert sample.rewards == {"environment": 0.0}
    assert episodes.take_counts()["agent_errors"] == 1


def test_what_is_asked_again_because_it_did_not_come_is_drawn_as_the_first_time() -> None:
    """Equally long questions of one episode have keys of their own; one that was given up leaves its key to the next."""
    keys: list[str] = []

    class Asked:
        prompts = (PROMPT,)
        engine = SimpleNamespace(end_conversations=AsyncMock())
        count_ended = staticmethod(lambda responses: None)

        async def generate(self, request: EngineRequest, **turns: Any) -> list[list[Generation]]:
            keys.extend(request.keys or ())
            await asyncio.sleep(0.01)
            return [[await hello([*request.prompts[0]], 4)]]

    class Episode:
        async def branches(self, prompt: Prompt, number: int, sample: Any) -> list[Any]:
            first, second = asyncio.ensure_future(sample([1, 2], 4)), asyncio.ensure_future(sample([3, 4], 4))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            await sample([1, 2], 4)
            await sample([5, 6], 4)
            return []

    groups = episode_groups(Episode(), SamplingParams(max_new_tokens=4), 1, 1.0)  # type: ignore[arg-type]
    asyncio.run(groups(Asked()))  # type: ignore[arg-type]
    assert keys == [f"train-7@2/0/2{again}" for again in ("", "/1", "", "/2")]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("asks_nothing", "ended 3 times on row train-7 without asking for a turn of the policy: it ended without an error"),
        ("another_model", "model is 'gpt-4o', which is not served here; it must be megarl"),
        ("strangers", "401"),
    ],
)
def test_an_agent_that_asks_for_nothing_ends_the_run_with_its_last_words(function: str, sentence: str) -> None:
    with pytest.raises(EpisodeError) as raised:
        acted(opened(AgentConfig(function=f"{HERE}:{function}", processes=1)))
    assert sentence in str(raised.value)


def test_an_engine_that_fails_is_heard_of_as_such() -> None:
    async def fails(ids: list[int], most: int, media: Any = None, /) -> Generation:
        raise EngineError("the engine died")

    with pytest.raises(EngineError, match="the engine died"):
        acted(opened(AgentConfig(function=f"{HERE}:two_turns", processes=1)), fails)


def test_a_command_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(EpisodeError, match="begins with 'no-such-agent', which is no program that can be found"):
        opened(AgentConfig(command=("no-such-agent",)))


def test_anthropics_messages_streamed_and_whole_and_a_key_whose_episode_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = opened(AgentConfig(function=f"{HERE}:two_turns", processes=1, models=("claude",)))
    agents = episodes.context.shared
    assert agents is not None
    seen: dict[str, Any] = {}

    async def run(task: Any) -> Any:
        root, head = task.base_url.removesuffix("/v1"), {"x-api-key": task.api_key}
        body: dict[str, Any] = {"model": "claude", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
        async with aiohttp.ClientSession(headers=head) as client:
            async with client.post(f"{root}/v1/messages", json=body) as answer:
                seen["whole"] = await answer.json()
            said = [*body["messages"], {"role": "assistant", "content": seen["whole"]["content"]}]
            body |= {"messages": [*said, {"role": "user", "content": "and?"}], "stream": True}
            async with client.post(f"{root}/v1/messages", json=body) as answer:
                seen["events"] = [json.loads(line[6:]) for line in (await answer.text()).splitlines() if line[:5] == "data:"]
            async with client.post(f"{root}/v1/messages", json={"model": "claude"}) as answer:
                seen["error"] = (answer.status, await answer.json())
            async with client.get(f"{root}/v1/models") as answer:
                seen["models"] = [one["id"] for one in (await answer.json())["data"]]
        seen["task"] = task
        return await run_before(task)

    run_before = agents._agent.run
    monkeypatch.setattr(agents._agent, "run", run)

    async def scenario() -> list[Sample]:
        samples = await episodes.branches(PROMPT, 0, hello)
        head = {"Authorization": f"Bearer {seen['task'].api_key}"}
        url = f"{seen['task'].base_url}/models"
        async with aiohttp.ClientSession(headers=head) as client, client.get(url) as answer:
            seen["ended"] = (answer.status, (await answer.json())["error"]["message"])
        return samples

    samples = asyncio.run(scenario())
    episodes.close()
    assert seen["whole"]["content"] == [{"type": "text", "text": "hi"}]
    assert (seen["whole"]["stop_reason"], seen["whole"]["usage"]["output_tokens"]) == ("end_turn", 3)
    assert [event["type"] for event in seen["events"]] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert seen["events"][2]["delta"] == {"type": "text_delta", "text": "hi"}
    assert seen["error"] == (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "messages must be a list with at least one message"},
        },
    )
    assert seen["models"] == ["megarl", "claude"]
    assert seen["ended"] == (401, "this key belongs to no episode that is open")
    assert len(samples) == 2, "what was asked over either protocol is in one tree"
