"""Options can be deleted, each with its folder and its line: the rest starts, refuses its sections and computes the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from megarl.config.option_sections import OPTION_OF_FIELD, SINGLE_FIELDS
from megarl.models.registry import OPTION_OF_FAMILY
from megarl.option_list import OPTIONS

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-arithmetic"
FOR_ALL = ("mirror", "agents", "distillation")
"""The options that `make test` deletes. `make test-all` deletes the others, too."""
COPIES = 7
MISSING_IN = dict(zip(OPTIONS, combinations(range(COPIES), 3), strict=False))
"""By option, the three of seven copies that lack it. No two options are missing in the same three, so for each pair a copy has
the one and lacks the other: what an option needs of another one is found, in a third of the time that a copy for each takes."""
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"],
        "allow_parentheses": False, "allow_negation": False}  # fmt: skip
CONFIG: dict[str, Any] = {
    "run": {"name": "tiny", "steps": 2, "eval_before": False},
    "model": {"path": str(MODEL), "dtype": "float32"},
    "policy": {"optimizer": {"lr": 5e-4}},
    "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
    "data": {
        "train": {"source": "reasoning_gym", "name": "basic_arithmetic", "limit": 100, "args": TASK},
        "chat_template": "never",
        "max_prompt_tokens": 8,
    },
    "rollout": {"engine": "embedded", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 4},
    "rewards": [{"name": "exact_number"}],
}
ASKED_BY_VALUE = {
    "transports": "rollout.weight_transport=rdma",
    "few_bits": "model.int4_experts=32",
    "online_pairs": "algorithm.name=online_dpo",
}
"""Values of core fields that ask for an option."""
ASKED_BY_ROWS = {
    "pictures": ({"question": "What is it?", "images": ["one.png"]}, "has pictures under 'images' (data.image_key), which"),
}
"""Rows that ask for an option, and the beginning of the sentence where it is missing."""
TIMED = ("time", "speed/", "memory/", "policy/tflops", "policy/mfu")


def megarl_at(root: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `megarl` from the package in `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def steps_of(root: Path, folder: Path) -> list[dict[str, Any]]:
    """The metrics of two steps of GRPO, without those of time and memory."""
    config = folder / "tiny.yaml"
    config.write_text(json.dumps(CONFIG))
    done = megarl_at(root, "train", str(config), folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows]


def without(options: Iterable[str], target: Path) -> Path:
    """A copy of the package without `options`; returns the folder that holds it."""
    shutil.copytree(ROOT / "megarl", target / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    listed = target / "megarl" / "option_list.py"
    for option in options:
        shutil.rmtree(target / "megarl" / "options" / option)
        left = listed.read_text().replace(f'    "{option}",\n', "")
        assert left != listed.read_text()
        listed.write_text(left)
    return target


@pytest.fixture(scope="module")
def steps_with_all(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same two steps with every option there."""
    if not MODEL.exists():
        pytest.skip("needs models/tiny-arithmetic (make tiny-model)")
    return steps_of(ROOT, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [name if name in FOR_ALL else pytest.param(name, marks=pytest.mark.exhaustive) for name in OPTIONS]
)
def test_without_an_option_a_run_computes_the_same(option: str, steps_with_all: list[dict[str, Any]], tmp_path: Path) -> None:
    root = without([option], tmp_path)
    steps = steps_of(root, tmp_path)
    assert {"policy/loss", "policy/grad_norm", "reward/mean", "mismatch/k3"} <= steps[0].keys()
    assert steps == [{name: whole[name] for name in left} for left, whole in zip(steps, steps_with_all, strict=True)]
    for field in (field for field, owner in OPTION_OF_FIELD.items() if owner == option):
        done = megarl_at(root, "plan", str(tmp_path / "tiny.yaml"), f"{field}={{}}", folder=tmp_path)
        assert done.returncode == 2
        named = field if field in SINGLE_FIELDS else f"section `{field.rpartition('.')[2]}`"
        assert f"{named} needs the option {option}, which this installation does not have" in done.stderr
    if option in ASKED_BY_VALUE:
        done = megarl_at(root, "plan", str(tmp_path / "tiny.yaml"), ASKED_BY_VALUE[option], folder=tmp_path)
        assert done.returncode == 2
        assert f"needs the option {option}, which this installation does not have" in done.stderr
    if option in ASKED_BY_ROWS:
        row, asked = ASKED_BY_ROWS[option]
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        done = megarl_at(root, "data", "inspect", "rows.jsonl", "--model", str(MODEL), folder=tmp_path)
        assert done.returncode == 2
        assert f"{asked} needs the option {option}, which this installation does not have" in done.stderr
    for family in (family for family, owner in OPTION_OF_FAMILY.items() if owner == option):
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps({"model_type": family}))
        done = megarl_at(root, "plan", str(tmp_path / "tiny.yaml"), f"model.path={tmp_path / family}", folder=tmp_path)
        assert done.returncode == 2
        assert f"it needs the option {option}, which this installation does not have" in done.stderr


def test_for_each_pair_a_copy_has_the_one_and_lacks_the_other() -> None:
    assert MISSING_IN.keys() == set(OPTIONS)
    assert len(set(MISSING_IN.values())) == len(OPTIONS)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("copy", range(COPIES))
def test_without_a_third_of_the_options_the_quick_tests_of_the_rest_pass(copy: int, tmp_path: Path) -> None:
    missing = [option for option, copies in MISSING_IN.items() if copy in copies]
    root = without(missing, tmp_path)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in (name for name in listed if not name.startswith("megarl/")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "models").symlink_to(ROOT / "models")
    for option in missing:
        shutil.rmtree(root / "tests" / "options" / option, ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not real and not exhaustive", "tests"]
    # whole runs, pages and benchmarks of all options, and this
    left_out = ("tests/themes", "tests/docs", "tests/benchmarks", "tests/options/test_deletion.py")
    done = subprocess.run(
        [*command, *(f"--ignore={name}" for name in left_out)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-4000:]
