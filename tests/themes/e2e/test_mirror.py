"""A run whose folder is lost goes on from its second place as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from megarl.config import Config
from megarl.core.steps import RlRun
from megarl.errors import RewardError
from megarl.observe import read_metrics
from megarl.runs.manifest import check
from megarl.runs.run_checkpoint import CheckpointFolder
from megarl.trainers.rl.train import train
from tests.checkpoint.s3_server import BUCKET, s3_server
from tests.themes.e2e.processes import start_megarl, wait_for_step
from tests.themes.e2e.records import curve, tensors
from tests.warm_workers import WarmWorkers

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]
STEPS, SAVED, LOST = 4, 2, 3
SETTINGS: dict[str, Any] = {
    "run.steps": STEPS,
    "run.save_every": SAVED,
    "run.keep_checkpoints": 1,
    "policy.layout": {"dp": 2},
    "policy.optimizer": {"lr": 1e-3, "schedule": "cosine"},
}


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.exhaustive), "s3"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """`run.mirror`, and where its files are."""
    if request.param == "folder":
        yield str(tmp_path / "second"), tmp_path / "second"
        return
    with s3_server(tmp_path / "store") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/team/runs", server.bucket / "team" / "runs"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_whose_folder_was_deleted_goes_on_from_the_mirror_bit_for_bit(
    mirror: tuple[str, Path],
    tiny_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = tiny_config(**SETTINGS, **{"run.name": "whole"})
    train(whole)
    address, files = mirror
    settings = {**SETTINGS, "run.name": "lost", "run.mirror": address}
    report = RlRun.report

    def fail_at_last(run: RlRun, batch: Any) -> None:
        report(run, batch)
        if run.step == LOST:
            raise RewardError("the machine is going down")

    with monkeypatch.context() as patch, pytest.raises(RewardError):
        patch.setattr(RlRun, "report", fail_at_last)
        train(tiny_config(**settings))
    lost = Path(whole.run_folder).with_name("lost")
    shutil.rmtree(lost)
    capsys.readouterr()

    config = tiny_config(**settings, **{"run.resume": "auto"})
    train(config)
    said = capsys.readouterr().out
    assert f"{lost}/checkpoints/step_{SAVED:06d} was fetched from the mirror {address}/lost" in said
    assert f"mirror: {address}/lost has the checkpoint of step {STEPS}" in said
    assert curve(lost) == curve(Path(whole.run_folder))
    for record in ("samples.jsonl", "distributions.jsonl"):
        assert lines(lost / record) == lines(Path(whole.run_folder) / record)
    last = f"checkpoints/step_{STEPS:06d}"
    wanted, found = tensors(Path(whole.run_folder) / last / "policy"), tensors(lost / last / "policy")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key

    there = files / "lost"
    check(there / last)
    assert [path.name for path in (there / "checkpoints").iterdir()] == [Path(last).name]
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json", "config.yaml"):
        assert (there / name).read_bytes() == (lost / name).read_bytes()
    figures = read_metrics(lost / "metrics.jsonl")
    assert all(row["checkpoint/mirror_failures"] == 0 for row in figures[1:])
    assert figures[-1]["checkpoint/mirrored_step"] == SAVED


@pytest.mark.exhaustive
def test_a_run_that_loses_its_folder_and_its_driver_is_started_again_from_the_mirror(
    tiny_config: Callable[..., Config], warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "run.steps": 8, "rollout.threads": 1, "data.eval": None}
    whole = tiny_config(**settings, **{"run.name": "whole"})
    train(whole)
    hit = tiny_config(**settings, **{"run.name": "hit", "run.mirror": str(tmp_path / "second")})
    (tmp_path / "hit.yaml").write_text(yaml.safe_dump(hit.model_dump(mode="json", exclude_none=True)))
    folder, there = Path(hit.run_folder), CheckpointFolder(tmp_path / "second" / "hit" / "checkpoints")
    run = start_megarl("train", str(tmp_path / "hit.yaml"), environment=warm_workers.environment)
    try:
        wait_for_step(run, folder, SAVED + 1)
        while not there.all():
            assert run.poll() is None
        (driver,) = (one for one in psutil.Process(run.pid).children() if "train" in one.cmdline())
        driver.suspend()
        while folder.exists():  # what the ranks are writing may appear meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        driver.kill()
        _, said = run.communicate(timeout=400)
    finally:
        run.kill()
    assert run.returncode == 0, said
    assert curve(folder) == curve(Path(whole.run_folder))
    assert lines(folder / "samples.jsonl") == lines(Path(whole.run_folder) / "samples.jsonl")
    (fault,) = lines(folder / "faults.jsonl")
    assert fault["what"] == "it was killed by SIGKILL"
    assert there.all()[-1].name == "step_000008"
