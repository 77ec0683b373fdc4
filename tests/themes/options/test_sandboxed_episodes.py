"""Chats whose tools work in a sandbox, agents that run commands in one, and agents that live in one."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import EpisodeError
from megarl.options.agents.section import AgentConfig
from megarl.options.sandboxes.section import SandboxConfig
from megarl.rewards import build_rewards
from megarl.rollout.engines.protocol import Generation
from megarl.rollout.episodes import open_episodes
from tests.data.chat_tokenizers import CHATML, byte_tokenizer, ids_of
from tests.options.agents import agent_parts
from tests.options.sandboxes.test_sandboxes import processes_in
from tests.rewards.sandboxed import landlock_version
from tests.rollout.episode_parts import PROMPT, Script, Settings, opened

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")]
TOKENIZER = byte_tokenizer(CHATML)
SANDBOX = SandboxConfig(kind="seccomp", memory_mb=512, timeout_s=3)
TOOLS = ("sandbox:bash", "sandbox:python", "sandbox:write_file", "sandbox:read_file")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def chatted(*turns: str, times: int = 1, **settings: Any) -> tuple[list[Sample], dict[str, int]]:
    episode, context = opened(TOKENIZER, Settings(tools=TOOLS, sandbox=SANDBOX, **settings))

    async def scenario() -> list[Sample]:
        scripts = [Script([(ids_of(turn, "<|end|>"), "stop") for turn in turns]) for _ in range(times)]
        made = await asyncio.gather(*(episode(PROMPT, n, script, context) for n, script in enumerate(scripts)))
        return [sample for sample in made if isinstance(sample, Sample)]

    try:
        return asyncio.run(scenario()), context.take_counts()
    finally:
        context.close()


def test_tools_of_a_chat_work_in_a_folder_that_stays_for_the_episode() -> None:
    before = {*Path("/tmp").glob("megarl-sandbox-*")}
    [sample], counts = chatted(
        call("write_file", path="src/a.py", content="print(6 * 7)\n"),
        call("bash", command="python3 src/a.py; ls"),
        call("read_file", path="src/a.py") + call("python", code="print(open('src/a.py').read().upper())"),
        call("bash", command="sleep 60"),
        call("bash", cmd="ls"),
        call("read_file", path="/etc/shadow"),
        "done",
    )
    told = [turn["content"] for turn in sample.turns if turn["role"] == "tool"]
    assert told[:3] == ["[no output]", "42\nsrc", "print(6 * 7)"]
    assert told[3] == "PRINT(6 * 7)"
    assert told[4] == "error: bash did not answer within 3 s"
    assert told[5] == "error: bash: it takes the texts command, no more and no less"
    assert "Permission denied" in told[6]
    assert counts == {"turns": 7, "tool_calls": 7, "tool_timeouts": 1, "tool_errors": 1}
    assert {*Path("/tmp").glob("megarl-sandbox-*")} <= before


def test_each_episode_has_a_folder_of_its_own() -> None:
    samples, _ = chatted(call("bash", command="ls; touch mine"), call("bash", command="ls"), "done", times=6)
    for sample in samples:
        assert [turn["content"] for turn in sample.turns if turn["role"] == "tool"] == ["[no output]", "mine"]


def test_a_tool_that_is_not_there_and_a_machine_without_the_kind_are_refused() -> None:
    with pytest.raises(EpisodeError, match=r"rollout.episode.tools has 'sandbox:bsh' \(did you mean 'bash'\?\)"):
        opened(TOKENIZER, Settings(tools=["sandbox:bsh"], sandbox=SANDBOX))
    broken = SANDBOX.model_copy(update={"memory_mb": 1})
    with pytest.raises(EpisodeError, match=r"rollout.episode.sandbox.kind is 'seccomp', but commands cannot run so"):
        opened(TOKENIZER, Settings(tools=TOOLS, sandbox=broken))


@pytest.mark.parametrize(("kind", "said"), [("auto", ["seccomp (rollout.episode.sandbox.kind is 'auto')"]), ("seccomp", [])])
def test_what_auto_chose_is_told_for_tools_and_for_agents(
    monkeypatch: pytest.MonkeyPatch, kind: Literal["auto", "seccomp"], said: list[str]
) -> None:
    """Neither program of containers is there."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    sandbox = SANDBOX.model_copy(update={"kind": kind, "image": "image.sif"})
    agent = AgentConfig(function=f"{agent_parts.__file__}:asks_nothing")
    for settings in (
        Settings(tools=TOOLS, sandbox=sandbox),
        Settings(kind="agent", tools=(), agent=agent, sandbox=sandbox),
    ):
        data = DataConfig(train=SourceConfig(name="chain_sum"), max_prompt_tokens=1000)
        episodes = open_episodes(settings, data, TOKENIZER, 4000)
        try:
            assert episodes.context.choices == [f"sandboxes: {one}" for one in said]
        finally:
            episodes.close()


def acted(agent: AgentConfig, prompt: Prompt, *turns: str, **sandbox: Any) -> Sample:
    data = DataConfig(train=SourceConfig(name="chain_sum"), max_prompt_tokens=1000)
    settings = Settings(kind="agent", tools=(), agent=agent, sandbox=SANDBOX.model_copy(update=sandbox))
    episodes = open_episodes(settings, data, TOKENIZER, 4000)
    left = [*turns]

    async def say(ids: list[int], most: int, media: Any = None, /) -> Generation:
        said = ids_of(left.pop(0), "<|end|>")[:most]
        return Generation(said, [-0.5] * len(said), [3] * len(said), "stop")

    try:
        [sample] = asyncio.run(episodes.branches(prompt, 0, say))
    finally:
        episodes.close()
    return sample


ROW = {
    "question": "Write total(values).",
    "files": {"test_solution.py": "from solution import total\nassert total([1, 2]) == 3, 'not three'\n"},
    "answer": ["assert total([1, 2]) == 3", "assert total([5, 5, 5]) == 15"],
}
CODING = Prompt("train-1", "train-1@2", [1], "a prompt", ROW)
WRONG, CHEAT, RIGHT = (f"```python\ndef total(values):\n    return {body}\n```" for body in ("values", "3", "sum(values)"))


@pytest.mark.parametrize(("turns", "reward"), [((WRONG, RIGHT), 1.0), ((CHEAT,), 0.0), ((WRONG, WRONG, WRONG), 0.0)])
def test_the_coding_example_tests_in_its_sandbox_and_is_judged_by_hidden_tests(turns: tuple[str, ...], reward: float) -> None:
    agent = AgentConfig(function="examples/agents/coding/coding_agent.py:solve", processes=1, timeout_s=60)
    sample = acted(agent, CODING, *turns, files_key="files")
    several = list(turns) if len(turns) > 1 else []  # a sample of one turn has no list of them
    assert [turn["content"] for turn in sample.turns if turn["role"] == "assistant"] == several
    assert sample.response_text == turns[-1]
    told = [turn["content"] for turn in sample.turns if turn["role"] == "user"]
    assert told[: len(turns) - 1] == ["The tests fail: AssertionError: not three Write the whole function again."] * (
        len(turns) - 1
    )
    rewards = build_rewards([RewardConfig(name="code_tests", args={"timeout_s": 5})], DataConfig(train=SourceConfig(name="x")))
    assert rewards.score([sample]) == [reward]


INSIDE = """
import json, os, socket, subprocess, sys
import openai

task = json.load(sys.stdin)
client = openai.OpenAI()
answer = client.chat.completions.create(model="megarl", messages=[{"role": "user", "content": task["prompt"]}])
done = []
def attempt(name, what):
    try:
        what()
        done.append(name)
    except OSError:
        pass
attempt("read", lambda: open(sys.argv[1]).read())
attempt("other port", lambda: socket.create_connection(("127.0.0.1", int(sys.argv[2])), 3))
attempt("write", lambda: open("/tmp/megarl-attack", "w"))
attempt("folder", lambda: open("mine", "w").write(answer.choices[0].message.content))
assert os.environ.get("SECRET") is None
printed = subprocess.run(["cat", "mine", "given.txt"], capture_output=True, text=True).stdout
subprocess.Popen(["sleep", "600"], start_new_session=False)
client.post("/reward", body={"reward": float(done == ["folder"] and printed == "hi" + "there")}, cast_to=object)
"""


def test_an_agent_in_a_sandbox_reaches_its_endpoint_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "agent.py").write_text(INSIDE)
    (tmp_path / "secret").write_text("s")
    agent = AgentConfig(
        command=(sys.executable, str(tmp_path / "code" / "agent.py"), str(tmp_path / "secret"), "22"), timeout_s=90
    )
    prompt = Prompt("train-1", "train-1@2", [1], "a prompt", {"question": "q", "files": {"given.txt": "there"}})
    sample = acted(agent, prompt, "hi", files_key="files", readable=(str(tmp_path / "code"),), memory_mb=2048)
    assert sample.rewards == {"environment": 1.0}
    assert processes_in("/tmp/megarl-sandbox-") == []


def test_an_agent_in_a_sandbox_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"(?s)without asking for a turn of the policy: it failed in its sandbox: .*no luck"):
        acted(AgentConfig(command=("sh", "-c", "echo no luck >&2; exit 3")), CODING)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({}, 400, "command must be a shell's text, or a list of a program and its arguments"),
        ({"command": ["ls", 3]}, 400, "command must be"),
        ({"command": "ls", "stdin": 3}, 400, "stdin must be a text"),
        (
            {"command": "ls", "timeout_s": -1},
            400,
            "timeout_s is -1; it must be a number above 0 and at most 86400, or left out",
        ),
    ],
)
def test_what_is_asked_of_a_sandbox_is_checked(body: dict[str, Any], status: int, sentence: str) -> None:
    from megarl.options.agents.messages import RequestError
    from megarl.options.agents.server import read_command

    with pytest.raises(RequestError, match=sentence) as raised:
        read_command(body)
    assert raised.value.status == status
