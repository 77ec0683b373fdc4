"""Whatever folder of a run a user names, every command finds what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import CheckpointError
from megarl.runs.folders import checkpoint_in, run_of, weights_in
from megarl.runs.run_checkpoint import CheckpointFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    for step in (2, 10):
        policy = folder / "checkpoints" / f"step_{step:06d}" / "policy"
        policy.mkdir(parents=True)
        (policy / ".metadata").touch()
        (policy.parent / "state.json").touch()
    (folder / "metrics.jsonl").touch()
    return folder


@pytest.mark.parametrize(
    ("named", "step"),
    [
        ("", 10),
        ("checkpoints", 10),
        ("checkpoints/step_000002", 2),
        ("checkpoints/step_000002/policy", 2),
        ("checkpoints/step_000010", 10),
    ],
)
def test_a_run_is_its_newest_checkpoint_and_any_folder_in_it_leads_to_it(run: Path, named: str, step: int) -> None:
    checkpoint = run / "checkpoints" / f"step_{step:06d}"
    assert checkpoint_in(run / named) == checkpoint
    assert weights_in(run / named) == checkpoint / "policy"
    assert run_of(run / named) == run


def test_a_model_is_itself_and_an_exported_one_is_taken_where_it_is_wanted(run: Path, tmp_path: Path) -> None:
    model = run / "model"
    model.mkdir()
    (model / "config.json").touch()
    assert weights_in(model) == model
    assert weights_in(run, exported_first=True) == model
    assert weights_in(run) == run / "checkpoints" / "step_000010" / "policy"
    assert (checkpoint_in(tmp_path / "gone"), weights_in(tmp_path / "gone")) == (None, tmp_path / "gone")


def test_the_error_names_what_the_user_set(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^--checkpoint is 'x', .*; it must be a run folder, or a folder such as"):
        CheckpointFolder(tmp_path).resolve("x", "--checkpoint")
    with pytest.raises(CheckpointError, match=r"^run.resume is 'x', .*; it must be 'never', 'auto' or a folder such as"):
        CheckpointFolder(tmp_path).resolve("x")
