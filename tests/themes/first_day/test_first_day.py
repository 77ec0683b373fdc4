"""Eight tasks of a first day with megarl, each a script of documented commands over files that a person writes.

Each folder beside this file is a task: `task.sh` and the files that it needs. A task runs in a folder that has these and
`models/`, with `megarl` and `python` on its PATH; then what it left is checked, not only that it ended. The whole day is
`python -m pytest tests/themes/first_day -m ""`. They take minutes, and what they do stands in smaller tests: pages that are run
(tests/docs), runs (tests/themes/e2e), conversions that die (tests/convert/test_resume.py). `make test` does the one that trains
nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megarl.config import load_config
from megarl.observe import read_metrics
from tests.warm_workers import WarmWorkers

TASKS = Path(__file__).parent
ROOT = TASKS.parents[2]
DEADLINE_S = 1100

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@dataclass(frozen=True)
class Day:
    """A task that was done: its folder, and what its script printed."""

    folder: Path
    printed: str

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def rows(self, name: str) -> list[Any]:
        """The rows of a JSONL file."""
        return [json.loads(line) for line in (self / name).read_text().splitlines()]

    def metrics(self, run: str) -> list[Mapping[str, float]]:
        """The steps of a run, the evaluation before the first left out."""
        return [row for row in read_metrics(self / f"runs/{run}/metrics.jsonl") if row["step"] > 0]

    @property
    def first_curve(self) -> str:
        """What the script said of the time to the first reward curve, which is then drawn in the report."""
        assert all('"reward/mean"' in report.read_text() for report in self.folder.glob("runs/*/report.html"))
        said = re.search(r"first reward curve \d+ s after megarl train", self.printed)
        assert said
        return f"{self.folder.name}: {said[0]}"


def do(task: str, folder: Path, environment: Mapping[str, str]) -> Day:
    """Run the script of `task` in `folder`, which gets the task's files."""
    if not (ROOT / "models/tiny-arithmetic/config.json").is_file():
        pytest.skip("needs models/tiny-arithmetic (make tiny-model)")
    shutil.copytree(TASKS / task, folder, dirs_exist_ok=True)
    (folder / "models").symlink_to(ROOT / "models")
    programs = folder.parent / "bin"  # `megarl` and `python` are those of this interpreter, and megarl that of this checkout
    programs.mkdir(exist_ok=True)
    (programs / "megarl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m megarl "$@"\n')
    (programs / "megarl").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | environment
    script = subprocess.Popen(
        ["bash", "task.sh"], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with nothing_left_of(script):
        printed, _ = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 0, printed[-6000:]
    return Day(folder, printed)


@contextlib.contextmanager
def nothing_left_of(script: subprocess.Popen[str]) -> Iterator[None]:
    """End `script` and what it started, if it did not come to its end."""
    try:
        yield
    finally:
        if script.poll() is None:
            left = psutil.Process(script.pid).children(recursive=True)
            for process in (script, *left):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            script.wait()


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line, whatever pytest does with what tests print."""

    def write(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text}\n")

    return write


def check_own_data(day: Day) -> None:
    """The values of the first task, however its processes were started."""
    assert [line.split()[1] for line in day.printed.splitlines() if line.startswith("reward  ")] == ["1", "0.1"]
    assert "exit code 130" in day.printed
    stopped = int(re.search(r"stopped by Ctrl-C after step (\d+) of 5000; run.resume=auto continues from", day.printed)[1])
    steps = day.metrics("mine")
    assert [row["step"] for row in steps] == list(range(1, stopped + 6))  # the resumed run lost none, and did none twice
    assert [path.name for path in sorted((day / "runs/mine/checkpoints").iterdir())][-1] == f"step_{stopped + 5:06d}"
    rewards = [row["reward/mean"] for row in steps]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1
    answers = day.rows("answers.jsonl")
    evaluated = json.loads((day / "eval.json").read_text())
    assert len(answers) == 240  # more rows than procedural sources give by default: all of the file's
    assert evaluated["prompts"] == 240
    given = [answer["rewards"]["my_reward.py:right_sum"] for answer in answers]
    assert evaluated["reward"] == pytest.approx(sum(given) / 240)
    assert evaluated["accuracy"] == pytest.approx(sum(answer["right"] for answer in answers) / 240)
    assert [answer["right"] for answer in answers] == [reward == 1 for reward in given]
    assert evaluated["reward"] > next(row for row in read_metrics(day / "runs/mine/metrics.jsonl"))["eval/reward"]


@pytest.mark.exhaustive  # tests/docs runs the page of the same name, tests/themes/e2e/test_stop.py stops and resumes
def test_own_data_and_reward_with_ctrl_c_resume_and_evaluation(
    warm_workers: WarmWorkers, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    day = do("own_data", tmp_path / "own_data", warm_workers.environment)
    check_own_data(day)
    tell(day.first_curve)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_same_where_nothing_was_started_before(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """The time that it prints is a newcomer's: no worker has imported anything."""
    day = do("own_data", tmp_path / "own_data_cold", {})
    check_own_data(day)
    tell(day.first_curve)


@pytest.mark.exhaustive
def test_a_reward_server_of_ones_own_and_megarls_server(
    warm_workers: WarmWorkers, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    day = do("reward_server", tmp_path / "reward_server", warm_workers.environment)
    assert [line.split()[1] for line in day.printed.splitlines() if line.startswith("reward  ")] == ["1", "0", "1"]
    judged = [reward for rewards in day.rows("judged.jsonl") for reward in rewards]
    steps = day.metrics("served")
    assert len(judged) == 3 + 3 * 32  # two tries, one before the run, then each response of three steps once
    by_step = [judged[3 + 32 * step : 35 + 32 * step] for step in range(3)]
    assert [row["reward/mean"] for row in steps] == pytest.approx([sum(rewards) / 32 for rewards in by_step])
    assert json.loads((day / "answer.json").read_text())["rewards"] == [1.0, 0.0]
    assert re.search(r"listening on http://127\.0\.0\.1:[1-9]\d*/get_reward \(my_reward\.py:right\)", day.printed)
    tell(day.first_curve)


@pytest.mark.exhaustive
def test_sft_then_dpo_on_rows_of_ones_own(warm_workers: WarmWorkers, tmp_path: Path) -> None:
    day = do("sft_then_dpo", tmp_path / "sft_then_dpo", warm_workers.environment)
    losses = [row["train/loss"] for row in day.metrics("sft")]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert "warning" not in day.printed
    summary = json.loads((day / "runs/dpo/summary.json").read_text())
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert before["accuracy"] == 0.5  # policy and reference are the same
    assert after["accuracy"] > 0.7
    assert after["margin"] > 0.1
    sft, dpo = (load_file(day / f"runs/{name}/model/model.safetensors") for name in ("sft", "dpo"))
    assert sft.keys() == dpo.keys()
    assert any(not torch.equal(sft[name], dpo[name]) for name in sft)
    model = transformers.AutoModelForCausalLM.from_pretrained(day / "runs/dpo/model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(day / "runs/dpo/model")
    pairs = day.rows("held_out.jsonl")
    sides = [[log_prob(model, tokenizer, row["ask"], row[side]) for side in ("good", "bad")] for row in pairs]
    assert sum(good > bad for good, bad in sides) / len(sides) > 0.7


def log_prob(model: Any, tokenizer: Any, prompt: str, response: str) -> float:
    """The log-prob of `response` after `prompt`, as transformers computes it."""
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))
    ids = torch.tensor([before + after + [tokenizer.eos_token_id]])
    with torch.no_grad():
        rows = model(ids).logits[0, :-1].log_softmax(-1)
    return float(rows.gather(1, ids[0, 1:, None])[len(before) - 1 :].sum())


@pytest.mark.exhaustive
def test_ppo_computes_the_same_with_the_critic_in_a_layout_of_its_own(
    warm_workers: WarmWorkers, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    day = do("critic_layout", tmp_path / "critic_layout", warm_workers.environment)
    together, apart = day.metrics("together"), day.metrics("apart")
    assert [row["step"] for row in apart] == [1, 2, 3]
    computed = ("reward/mean", "critic/loss", "critic/value", "critic/explained_variance", "policy/loss", "policy/grad_norm")
    for name in computed:
        assert [row[name] for row in apart] == pytest.approx([row[name] for row in together], rel=1e-3, abs=1e-5), name
    assert together[0]["critic/value"] != together[1]["critic/value"]  # the critic learns
    placed = [json.loads((day / f"runs/{run}/placement.json").read_text())["ranks"] for run in ("together", "apart")]
    assert [{role: len(ranks) for role, ranks in roles.items()} for roles in placed] == [
        {"policy": 2, "critic": 1},
        {"policy": 2, "critic": 2},
    ]
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(day / "critic_model")
    assert critic.num_labels == 1
    tell(day.first_curve)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_conversion_that_is_killed_again_and_again_is_byte_for_byte_the_same(tmp_path: Path) -> None:
    day = do("conversion", tmp_path / "conversion", {})
    killed = [int(chunks) for chunks in re.findall(r"killed after (\d+) of 101 chunks", day.printed)]
    assert len(killed) == 3
    assert killed == sorted(killed)  # what was done stays done
    record = "megarl_conversion.json"  # says how much this command wrote

    def files(folder: Path) -> dict[str, bytes]:
        found = (path for path in folder.rglob("*") if path.is_file() and path.name != record)
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}

    assert files(day / "dist") == files(day / "undisturbed")
    original, exported = load_file(day / "model/model.safetensors"), load_file(day / "exported/model.safetensors")
    assert original.keys() == exported.keys()
    assert all(original[name].numpy().tobytes() == exported[name].numpy().tobytes() for name in original)
    assert not list(day.folder.glob(".*.converting"))


@pytest.mark.exhaustive
def test_a_tool_of_ones_own_is_called_and_its_answers_are_told(
    warm_workers: WarmWorkers, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    day = do("own_tool", tmp_path / "own_tool", warm_workers.environment)
    stock = {"apples": "12", "books": "7", "coins": "340", "stamps": "58"}
    asked = Counter((day / "asked.txt").read_text().split())
    assert set(stock) <= set(asked)
    assert sum(row["episode/tool_calls"] for row in day.metrics("tools")) >= sum(asked.values())  # a call may lack its argument
    rewards = []
    for sample in day.rows("runs/tools/samples.jsonl"):
        told = [turn["content"] for turn in sample["turns"] if turn["role"] == "tool"]
        if sample["row"]["answer"] in told:  # it asked for the right item, was told how many there are, and answered
            rewards.append(sample["training"]["reward"])
            assert sample["training"]["reward"] == float(sample["response_text"].strip() == sample["row"]["answer"])
    assert sum(rewards) > 0
    tell(day.first_curve)


def write_32b(folder: Path) -> None:
    """A folder as a download would leave it, but for what is in the tensors: megarl submit looks for weights and tokenizer."""
    shutil.copytree(ROOT / "examples/models/qwen3-32b", folder)
    save_file({"model.norm.weight": torch.zeros(1)}, folder / "model.safetensors")
    shutil.copy(ROOT / "models/tiny-arithmetic/tokenizer.json", folder)


@pytest.mark.slow
def test_a_plan_and_a_job_script_from_nothing(tmp_path: Path) -> None:
    write_32b(tmp_path / "plan_and_job/downloaded/qwen3-32b")
    day = do("plan_and_job", tmp_path / "plan_and_job", {})
    assert load_config(day / "resolved.yaml") == load_config(day / "run.yaml")
    plan, best = (json.loads((day / name).read_text()) for name in ("plan.json", "best.json"))
    assert plan["fits"]
    assert best["fits"]
    searched = (day / "search.txt").read_text()
    first = float(re.search(r"^ *1 +([\d.]+)", searched, re.MULTILINE)[1])
    yours = float(re.search(r"^yours: ([\d.]+) s", searched, re.MULTILINE)[1])
    assert first < yours
    assert plan["times"]["step_s"] == pytest.approx(yours, rel=0.01)
    assert best["times"]["step_s"] == pytest.approx(first, rel=0.01)  # what the search printed can be pasted
    for name in ("job.sh", "best_job.sh"):
        script = day / name
        assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
        checked = subprocess.run([Path(sys.executable).parent / "shellcheck", script], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
        directives = re.findall(r"^#SBATCH (\S+)$", script.read_text(), re.MULTILINE)
        assert {"--nodes=8", "--gres=gpu:h100:8", "--account=my-lab", "--signal=B:USR1@1800"} <= set(directives)
    assert "mkdir -p" in day.printed
    assert re.search(r"warn_s is 60, but the step in progress .* takes \d+ s", day.printed)
    assert "refused with exit code 2" in day.printed


@pytest.mark.exhaustive
def test_a_run_of_verl_is_the_same_run_here(warm_workers: WarmWorkers, tmp_path: Path, tell: Callable[[str], None]) -> None:
    day = do("from_verl", tmp_path / "from_verl", warm_workers.environment)
    assert [row["step"] for row in day.metrics("from-verl")] == list(range(1, 8))  # 2 epochs of 101 rows, 32 a step, rounded up
    assert [line.split()[1] for line in day.printed.splitlines() if line.startswith("reward  ")] == ["1"]
    rewards = [row["reward/mean"] for row in day.metrics("from-verl")]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1
    saved = sorted(path.name for path in (day / "runs/from-verl/checkpoints").iterdir())
    assert saved[-1] == "step_000007"
    answers = Counter(sample["row"]["reward_model"]["ground_truth"] for sample in day.rows("runs/from-verl/samples.jsonl"))
    assert len(answers) > 1
    tell(day.first_curve)


def test_every_setting_of_the_verl_run_is_on_the_page_for_those_who_come_from_there() -> None:
    """By the last part of its name: the page gives several settings of one section in one line."""
    settings = re.findall(r"^ +([a-z_.0-9]+)=\S+", (TASKS / "from_verl/verl_run.sh").read_text(), re.MULTILINE)
    page = (ROOT / "docs/migrating.md").read_text()
    assert len(settings) == 27
    assert [name for name in settings if not re.search(rf"\b{name.rpartition('.')[2]}\b", page)] == []
