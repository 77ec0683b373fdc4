"""`megarl episodes try`: what tools, an environment and the rewards make of turns that are written, without an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl import cli
from tests.data.chat_tokenizers import byte_tokenizer

MINE = '''
import asyncio


def double(n: int) -> int:
    """
    Twice a number.

    Args:
        n: the number
    """
    return 2 * n


class Guess:
    def reset(self, prompt):
        self.number = int(prompt.row["answer"])
        return "Guess."

    def step(self, text):
        return "higher" if int(text) < self.number else "right", float(int(text) == self.number), int(text) == self.number
'''


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained("model")
    Path("model/config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    rows = [{"question": "2*2?", "answer": "4"}, {"question": "2*3?", "answer": "6"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(MINE)
    tree = {
        "run": {"name": "a"},
        "model": {"path": "model"},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 2000},
        "rollout": {"engine": "embedded", "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 500}
        | {"episode": {"kind": "tools", "tools": ["mine.py:double"], "max_turns": 4}},
        "rewards": [{"name": "exact_number"}],
    }
    Path("c.yaml").write_text(yaml.safe_dump(tree))
    return "c.yaml"


CALL = '<tool_call>{"name": "double", "arguments": {"n": 3}}</tool_call>'


def tried(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["episodes", "try", *arguments]) == 0
    return capsys.readouterr().out


def test_a_tool_is_called_and_the_answer_is_judged(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tried(capsys, config_file, "--row", "1", "--say", CALL, "--say", "It is 6.")
    assert "2*3?" in out
    assert out.index(CALL) < out.index("tool\n6") < out.index("It is 6.")
    assert "ended     stop; turns 2, tool_calls 1\n" in out
    assert "reward    1: exact_number 1 (weight 1)\n" in out
    assert "exact_number 0" in tried(capsys, config_file, "--say", "It is 6.")


def test_an_episode_that_wants_more_turns_says_so(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tried(capsys, config_file, "--say", CALL)
    assert "tool\n6" in out
    assert out.endswith("open      it asks for turn 2: give one more --say\n")


def test_an_environment_acts(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    episode = "rollout.episode={kind: environment, tools: [mine.py:Guess], max_turns: 4}"
    out = tried(capsys, config_file, episode, "rewards=[{name: environment}]", "--say", "3", "--say", "4")
    assert out.index("Guess.") < out.index("higher")
    assert "turns     0, 1\nreward    1: environment 1 (weight 1)\n" in out


def test_what_cannot_be_tried_is_one_sentence(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    agent = "rollout.episode={kind: agent, agent: {function: mine.py:double}}"
    for arguments, sentence in (
        ([config_file, agent, "--say", "4"], "rollout.episode.kind is 'agent', which has agents that ask an endpoint"),
        ([config_file, "--row", "2", "--say", "4"], "--row is 2, but data.train has no such row"),
        ([config_file, "data.max_prompt_tokens=4", "--say", "4"], "has a prompt of 23 tokens, but data.max_prompt_tokens is 4"),
    ):
        assert cli.main(["episodes", "try", *arguments]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1


def test_no_engine_is_imported(config_file: str) -> None:
    program = "import sys; from megarl.cli import main; print(main(sys.argv[1:]), *({'ray', 'sglang'} & {*sys.modules}))"
    command = [sys.executable, "-c", program, "episodes", "try", config_file, "--say", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"
