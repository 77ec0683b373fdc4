"""`megarl episodes try`: tools, environments and episodes of one's own answer what the user says in the policy's place."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl import cli
from tests.data.chat_tokenizers import byte_tokenizer

pytestmark = pytest.mark.needs_option("tools", "environments")

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'
OWN = """
class Guess:
    def reset(self, prompt):
        self.number, self.row = int(prompt.row["answer"]), prompt.row_id
        return "Guess my number of " + self.row

    def state_key(self):
        return self.number

    def step(self, text):
        guess = int(text) if text.isdigit() else 0
        return "higher" if guess < self.number else "lower", float(guess == self.number), guess == self.number


async def forgetful(prompt, number, sample, context):
    while True:  # does not read why a turn ended
        await sample(prompt.prompt_ids, 1)
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config with the calculator of the examples, and a model folder that has a tokenizer alone."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"question": "6*7?", "answer": "42"}\n{"question": "5*5?", "answer": "25"}\n')
    (tmp_path / "own.py").write_text(OWN)
    config = {
        "model": {"path": "model"},
        "data": {"train": {"source": "jsonl", "path": "rows.jsonl"}},
        "rollout": {"episode": {"kind": "tools", "tools": [f"{ROOT}/examples/tools/calculator.py:calculator"]}},
        "rewards": [{"name": "exact_number", "weight": 2.0}],
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return "c.yaml"


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> list[tuple[str, str]]:
    """What the command prints behind the prompt, as (who or what, value)."""
    assert cli.main(["episodes", "try", "c.yaml", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("assistant  "))
    return [(what, value.strip()) for what, _, value in (line.partition("  ") for line in lines[first:])]


def test_tools_answer_and_rewards_judge(config_file: str, capsys, monkeypatch) -> None:
    said = shown(capsys, "--say", CALL % "6*7", "--say", "42")
    call, answer, last, *facts = said
    assert (call, answer, last) == (("assistant", CALL % "6*7"), ("tool", "42"), ("assistant", "42"))
    sampled = len(CALL % "6*7") + 1 + len("42") + 1  # a token for each byte, and for the end of a turn
    told = dict(facts)
    assert told["finish_reason"] == "stop"
    assert told["tokens"].endswith(f"behind the prompt, {sampled} of them the policy's")
    assert told["counts"] == "turns 2, tool_calls 1"
    assert (told["exact_number"], told["reward"]) == ("1 (weight 2)", "2")
    assert "note" not in told
    monkeypatch.setattr("sys.stdin", io.StringIO("25"))
    assert dict(shown(capsys, "--say", "-", "--row", "1"))["reward"] == "2"


def test_what_goes_wrong_in_a_tool_is_told_to_the_policy_and_counted(config_file: str, capsys) -> None:
    said = shown(capsys, "--say", CALL % "6/0")
    assert said[1][1].startswith("error: ValueError: only whole numbers")
    assert said[2] == ("assistant", "(asked, but no --say is left)")
    told = dict(said[3:])
    assert told["finish_reason"] == "length"
    assert told["counts"] == "turns 2, tool_calls 1, tool_errors 1"
    assert told["note"] == "the episode asked for turns: 2; --say was given: 1"


def test_an_environment_answers_with_rewards_and_states(config_file: str, capsys) -> None:
    own = ["rollout.episode={kind: environment, tools: [own.py:Guess]}", "rewards=[{name: environment}]"]
    said = shown(capsys, *own, "--row", "1", "--say", "7", "--say", "25", "--say", "not asked")
    assert said[:3] == [("assistant", "7"), ("user", "higher"), ("assistant", "25")]
    told = dict(said[3:])
    assert (told["turn rewards"], told["turn states"]) == ("0, 1", "25, 25")
    assert (told["environment"], told["reward"]) == ("1 (weight 1)", "1")
    assert told["note"] == "the episode asked for turns: 2; --say was given: 3"
    assert cli.main(["episodes", "try", "c.yaml", *own, "--row", "1", "--say", "25"]) == 0
    assert "Guess my number of train-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--row", "2"], "--row is 2, but data.train has no such row"),
        (["rollout.episode={kind: environment, tools: [own.py:Gues]}"], "(did you mean 'Guess'?)"),
        (["rollout.episode={kind: own.py:forgetful}"], "the episode asked for 100 turns more than were given; it must end"),
        (
            ["rollout.episode={kind: agent, agent: {command: [run, me]}}", "data.chat_template=always"],
            "rollout.episode.kind is 'agent', which asks an endpoint of the run for its turns; it must be another kind",
        ),
        (["model.path=gone"], "there is no folder 'gone'"),
    ],
)
def test_a_mistake_is_one_sentence(config_file: str, capsys, argv: list[str], sentence: str) -> None:
    assert cli.main(["episodes", "try", config_file, "--say", "1", *argv]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_neither_torch_s_megatron_nor_ray_nor_sglang_is_loaded(config_file: str) -> None:
    program = "import sys; from megarl.cli import main; print(main(sys.argv[1:]), *sys.modules)"
    command = [sys.executable, "-c", program, "episodes", "try", config_file, "--say", "42"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    code, *modules = done.stdout.splitlines()[-1].split()
    assert (code, {"megatron", "ray", "sglang"} & set(modules)) == ("0", set())
