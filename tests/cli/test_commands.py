"""The command line: a user's mistake is one sentence on stderr and exit code 2, Ctrl-C is 130, nothing is half-written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl import cli
from megarl.cli import commands
from megarl.config import SupervisedConfig, config_fields
from megarl.errors import RewardError

CONFIG = """
model: {path: nowhere}
data:
  train: {source: reasoning_gym, name: basic_arithmetic}
rewards: [{name: reasoning_gym}]
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return "c.yaml"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "arguments are required: COMMAND"),
        (["trian", "c.yaml"], "did you mean 'train'?"),
        (["train"], "required: CONFIG; see 'megarl train --help'"),
        (["train", "missing.yaml"], "'missing.yaml' cannot be read"),
        (["train", "c.yaml", "--speed"], "--speed"),
        (["train", "c.yaml", "run.stpes=3"], "did you mean 'run.steps'?"),
        (["train", "c.yaml"], "model.path is 'nowhere', which is no folder"),
        (["eval", "c.yaml"], "data.eval is null"),
        (["train", "c.yaml", "--run.steps=3"], "fields are overridden without them: run.steps=3"),
        (["sft", "c.yaml", "--objective.name", "dft"], "fields are overridden without them: objective.name=VALUE"),
        (["eval", "c.yaml", "-run.steps=3"], "fields are overridden without them: run.steps=3"),
        (["config", "c.yaml", "algorithm.mini_batches=3"], "it must be 1, 2, 4, 8, 16, 32 or 64"),
        (["doctor", "run.steps=3"], "run.steps=3"),
        (["sft", "c.yaml"], "c.yaml has no section objective, but has rewards, as runs of `megarl train` have; run it by"),
        (["generate", "c.yaml"], "--out"),
        (["generate", "c.yaml", "--out", "x", "--as", "pears"], "'pears'"),
        (["data", "inspect", "missing.jsonl", "--model", "nowhere"], "missing.jsonl"),
        (["data", "show"], "'show'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(config_file: str, capsys, argv: list[str], part: str) -> None:
    assert cli.main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("megarl: ")
    assert output.err.count("\n") == 1
    assert part in output.err
    assert [path.name for path in Path().iterdir()] == ["c.yaml"]


def test_a_response_is_judged_without_a_model(config_file: str, capsys, monkeypatch) -> None:
    Path("rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}\n')
    Path("mine.py").write_text("def f(sample): return len(sample.prompt_text) * 10 + sample.response_text.count('4')\n")
    own = [
        "data.train={source: jsonl, path: rows.jsonl}", "rewards=[{name: mine.py:f}, {name: exact_number, weight: 0.5}]"
    ]  # fmt: skip
    for argv, reward in (
        (["--row", "1", "--response", "4 or 4"], "42.5"),
        (["--response", "4"], "41"),
        (["--response", "-"], "40.5"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("it is 2"))
        assert cli.main(["rewards", "try", config_file, *own, *argv]) == 0
        assert capsys.readouterr().out.splitlines()[-1].split() == ["reward", reward]
    program = "import sys; from megarl.cli import main; print(main(sys.argv[1:]), *sys.modules)"
    command = [sys.executable, "-c", program, "rewards", "try", config_file, *own, "--response", "4"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    code, *modules = done.stdout.splitlines()[-1].split()
    assert (code, "torch" in modules, "transformers" in modules) == ("0", False, False)
    assert cli.main(["rewards", "try", config_file, *own, "--row", "2", "--response", "4"]) == 2
    assert "--row is 2, but data.train has no such row" in capsys.readouterr().err


def test_fields_of_one_section_are_listed_as_wide_as_columns_say(config_file: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    for section, wanted in (("rollout.episode", "rollout.episode.max_turns"), ("evaluations", "evaluations[].temperature")):
        assert cli.main(["config", section]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 72
        first = [line.split()[0] for line in lines if line[:1].isalpha()]
        assert wanted in first
        assert {name for name in first if "." in name and name.split(".")[0].rstrip("[]") != section.split(".")[0]} == set()
    assert cli.main(["config", "rolout.episode"]) == 2
    assert capsys.readouterr().err == (
        "megarl: 'rolout.episode' is no file, and no section or field of a config (did you mean 'rollout.episode'?)\n"
    )


def test_overrides_may_stand_before_and_after_options(config_file: str, capsys) -> None:
    assert cli.main(["eval", config_file, "run.steps=5", "--checkpoint", "x", "run.seed=bad"]) == 2
    assert "run.seed is 'bad'" in capsys.readouterr().err


def test_an_error_of_any_room_is_caught(monkeypatch, capsys) -> None:
    def broken(_: object) -> int:
        raise RewardError("reward 'f' answered 3 values for 4 samples")

    monkeypatch.setattr(commands, "_config", broken)
    assert cli.main(["config"]) == 2
    assert capsys.readouterr().err == "megarl: reward 'f' answered 3 values for 4 samples\n"


def test_ctrl_c_is_130(monkeypatch, capsys) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_config", interrupted)
    assert cli.main(["config"]) == 130
    assert capsys.readouterr().err == "megarl: interrupted\n"


def test_config_lists_every_leaf(capsys) -> None:
    assert cli.main(["config"]) == 0
    out = capsys.readouterr().out
    for leaf in [*config_fields(), *config_fields(SupervisedConfig)]:
        assert leaf.name in out


@pytest.mark.parametrize(
    ("command", "objective", "loop"),
    [
        ("train", None, "rl"),
        ("train", "dpo", "supervised"),
        ("preference", "dpo", "supervised"),
        ("sft", "sft", "supervised"),
        ("sft", "dft", "supervised"),
        ("sft", "dpo", "s.yaml trains by dpo, but `megarl sft` trains by sft or dft; `megarl train` runs any config"),
        ("reward-model", "sft", "trains by reward_model or process_reward_model"),
        (
            "preference",
            None,
            "trains by sft, but `megarl preference` trains by dpo or cdpo or robust_dpo or ipo or apo_zero or apo_down or "
            "bco_pair or simpo or orpo or mixture or kto or bco",
        ),
    ],
)
def test_train_runs_any_config_and_its_aliases_what_they_promise(
    command: str, objective: str | None, loop: str, config_file: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    monkeypatch.setattr(commands, "_watch", lambda loop, config, arguments: trained.append(loop) or 0)
    monkeypatch.setattr("megarl.models.check_layouts.check_models", lambda _: None)
    given = "model: {path: nowhere}\ndata: {train: {source: jsonl, path: x}}\n"
    Path("s.yaml").write_text(given + (f"objective: {{name: {objective}}}\n" if objective else ""))
    file = config_file if (command, objective) == ("train", None) else "s.yaml"
    code = cli.main([command, file])
    if loop in ("rl", "supervised"):
        assert (code, trained) == (0, [f"megarl.trainers.{loop}.train"])
    else:
        assert (code, trained) == (2, [])
        assert loop in capsys.readouterr().err


def test_config_of_a_supervised_file_prints_it_too(config_file: str, capsys) -> None:
    Path("s.yaml").write_text(
        "model: {path: nowhere}\nobjective: {name: dpo}\npolicy: {layout: {dp: 2}}\ndata: {train: {source: jsonl, path: x}}\n"
    )
    assert cli.main(["config", "s.yaml", "objective.beta=0.3"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["objective"]["beta"] == 0.3
    assert "pairs per DP rank" in out


def test_config_of_a_file_prints_a_config_and_its_arithmetic(config_file: str, capsys) -> None:
    assert cli.main(["config", config_file, "rollout.prompts_per_step=3", "algorithm.mini_batches=2"]) == 0
    out = capsys.readouterr().out
    printed = yaml.safe_load(out)
    assert printed["rollout"]["prompts_per_step"] == 3
    assert printed["algorithm"]["advantage"] == "grpo"
    assert "sequences per mini-batch   12 = 24 / 2" in out


def test_the_module_is_the_command_and_help_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['megarl', 'config']; from megarl.cli import main; main(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    shown = subprocess.run([sys.executable, "-m", "megarl", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("megarl 0.")
