"""Batch scripts of runs whose names have slashes, and scripts with secrets: their owner's alone, and shown without them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli import main

SYSTEMS = {"slurm": ("sbatch", "Submitted batch job 7"), "pbs": ("qsub", "7.head"), "lsf": ("bsub", "Job <7> is submitted")}
KEY = "glpat-" + "a1B2" * 6
ENV = ["--env", f"WANDB_API_KEY={KEY}", "--env", "NCCL_IB_HCA=mlx5"]


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def batch_system(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command of the batch system's name that takes any script."""
    system = str(request.param)
    program, answer = SYSTEMS[system]
    for name, text in ((program, answer), ("sinfo", ""), ("scontrol", ""), ("sacctmgr", "")):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{text}'\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr("megarl.launch.preflight.check_site", lambda job, profile: [])
    monkeypatch.setattr("megarl.launch.job.check_folders", lambda config: None)
    return system


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("batch_system", SYSTEMS, indirect=True)
def test_a_script_with_a_secret_is_its_owners_alone(batch_system: str, rl_yaml: Path, tmp_path: Path) -> None:
    assert main(["submit", batch_system, str(rl_yaml), "run.name=mine", *ENV]) == 0
    script = tmp_path / "runs" / "mine" / "jobs" / f"mine.{batch_system}.sh"
    assert KEY in script.read_text()
    assert stat.S_IMODE(script.stat().st_mode) == 0o600


@pytest.mark.parametrize("batch_system", SYSTEMS, indirect=True)
def test_a_name_with_a_slash_gives_every_seed_a_folder(batch_system: str, rl_yaml: Path, tmp_path: Path) -> None:
    assert main(["submit", batch_system, str(rl_yaml), "run.name=team/mine", "--seeds", "3,4"]) == 0
    script = tmp_path / "runs" / "team" / "mine" / "jobs" / f"mine.{batch_system}.sh"
    lines = [line for line in script.read_text().splitlines() if re.match(r'run=|options=\("run', line)]
    said = subprocess.run(
        ["bash", "-c", "seed=4\n" + "\n".join(lines) + '\nprintf "%s\\n" "$run" "${options[@]}"'],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert said == [str(tmp_path / "runs" / "team" / "mine-seed4"), "run.seed=4", "run.name=team/mine-seed4"]


@pytest.mark.parametrize("batch_system", SYSTEMS, indirect=True)
def test_runs_of_seeds_that_are_there_are_found_below_a_slash(
    batch_system: str, rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "runs" / "team" / "mine-seed4"
    there.mkdir(parents=True)
    (there / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["submit", batch_system, str(rl_yaml), "run.name=team/mine", "--seeds", "3,4", "--dry-run"]) == 2
    assert f"{there} already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_dry_run_shows_no_secrets_and_nothing_else_changed(
    system: str, rl_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", system, str(rl_yaml), "--dry-run", "--env", "NCCL_IB_HCA=mlx5"]) == 0
    plain = capsys.readouterr()
    assert "secrets are not shown" not in plain.err
    assert main(["submit", system, str(rl_yaml), "--dry-run", *ENV]) == 0
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err
    assert "megarl: secrets are not shown" in shown.err
    assert [line for line in shown.out.splitlines() if "WANDB_API_KEY" not in line] == plain.out.splitlines()
    assert main(["submit", "ray", str(rl_yaml), f"rewards.0.args.api_key={KEY}", "--dry-run"]) == 0
    assert KEY not in capsys.readouterr().out


@pytest.mark.usefixtures("open_umask")
def test_the_environment_that_other_nodes_read_is_its_owners_alone(
    rl_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for system in ("pbs", "lsf"):
        assert main(["submit", system, str(rl_yaml), "--dry-run"]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if '>"$job/environment.sh"' in line]
        (tmp_path / system).mkdir()
        subprocess.run(["bash", "-c", f"umask 000; job={tmp_path / system}\n{line}"], check=True)
        file = tmp_path / system / "environment.sh"
        assert "declare -x PATH=" in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
