"""Copies to the second place are made while a run trains: the newest first, none in its way, and no failure ends it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import parse_config
from megarl.errors import CheckpointError, ConfigError, MirrorError
from megarl.options.mirror.run import Mirroring
from megarl.options.mirror.stores import FolderStore
from megarl.runs.manifest import FileRecord
from megarl.runs.run_checkpoint import CheckpointFolder, write_state

TASK = {"name": "chain_sum"}
SETTINGS = {"model": {"path": "model"}, "data": {"train": TASK, "eval": TASK}, "rewards": [{"name": "exact_number"}]}


class Copied:
    """A run of which there is only its folder, `runs/run`, and its copies, `second/run`."""

    def __init__(self, root: Path, save_s: float = 600.0, **run: Any) -> None:
        settings = {"folder": str(root / "runs"), "mirror": str(root / "second"), **run}
        tree = {**SETTINGS, "run": settings, "resources": {"deadlines": {"save_s": save_s}}}
        self.config = parse_config(tree)
        self.folder, self.second = root / "runs" / "run", root / "second" / "run"
        keep, best = self.config.run.keep_checkpoints, self.config.run.keep_best
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", keep, best)
        self.mirroring = Mirroring(self.config, self.checkpoints)

    def save(self, step: int, accuracy: float = 0.0) -> Path:
        folder = self.checkpoints.begin(step)
        write_state(folder, {"step": step})
        return self.checkpoints.commit(step, evaluation={"accuracy": accuracy})

    def copy(self, step: int, accuracy: float = 0.0) -> list[str]:
        """Save and copy, and what is said of it."""
        self.mirroring.saved(self.save(step, accuracy))
        self.mirroring.wait()
        return self.mirroring.take_lines()

    @property
    def there(self) -> list[int]:
        return [int(path.name.removeprefix("step_")) for path in CheckpointFolder(self.second / "checkpoints").all()]


def blocking(monkeypatch: pytest.MonkeyPatch, file: str) -> tuple[threading.Event, threading.Event]:
    """From now on no file of this name is put before the second event, and the first one tells that it is waited for."""
    waits, may_go_on, put = threading.Event(), threading.Event(), FolderStore.put

    def late(store: FolderStore, name: str, blocks: Iterable[bytes], record: FileRecord) -> None:
        if Path(name).name == file:
            waits.set()
            assert may_go_on.wait(60)
        put(store, name, blocks, record)

    monkeypatch.setattr(FolderStore, "put", late)
    return waits, may_go_on


def test_the_newest_wins_and_what_is_being_copied_stays_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Copied(tmp_path, keep_checkpoints=1)
    waits, may_go_on = blocking(monkeypatch, "state.json")
    steps: list[list[int]] = []
    send = run.mirroring.mirror.send
    monkeypatch.setattr(run.mirroring.mirror, "send", lambda checkpoint: (send(checkpoint), steps.append(run.there))[0])
    run.mirroring.saved(run.save(1))
    assert waits.wait(60)
    for step in (2, 3, 4):
        run.mirroring.saved(run.save(step))
    assert [path.name for path in run.checkpoints.all()] == ["step_000001", "step_000004"]
    may_go_on.set()
    run.mirroring.wait()
    assert steps == [[1], [1, 4]]
    assert run.there == [4]
    assert run.mirroring.figures() == {"checkpoint/mirrored_step": 4, "checkpoint/mirror_failures": 0}
    run.save(5)
    assert [path.name for path in run.checkpoints.all()] == ["step_000005"]


def test_a_place_that_fails_is_said_and_counted_once_a_copy_and_tried_again(tmp_path: Path) -> None:
    run = Copied(tmp_path)
    assert run.copy(1) == [f"mirror: {run.second} has the checkpoint of step 1"]
    shutil.rmtree(run.second)
    run.second.write_text("a file, where a folder was")
    for failures in (1, 2):
        first, last = run.copy(1 + failures)
        assert first.startswith(f"mirror: {run.second} does not have step_00000{1 + failures}: '{run.second}")
        assert first.endswith("Not a directory; it is tried again with the next checkpoint")
        assert last == f"mirror: {run.second} has the checkpoint of step 1"
        assert run.mirroring.figures() == {"checkpoint/mirrored_step": 1, "checkpoint/mirror_failures": failures}
    run.second.unlink()
    assert run.copy(4) == [f"mirror: {run.second} has the checkpoint of step 4"]
    assert run.mirroring.figures() == {"checkpoint/mirrored_step": 4, "checkpoint/mirror_failures": 2}


def test_the_lines_of_a_step_are_there_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that is brought back in between would lack them."""
    run = Copied(tmp_path)
    run.folder.mkdir(parents=True)
    waits, may_go_on = blocking(monkeypatch, "manifest.json")
    (run.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    run.mirroring.saved(run.save(1))
    assert waits.wait(60)
    assert (run.second / "metrics.jsonl").read_text() == '{"step": 1}\n'
    may_go_on.set()
    run.mirroring.wait()


def test_a_mistake_of_our_own_ends_no_run_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Copied(tmp_path)
    monkeypatch.setattr(run.mirroring.mirror, "send", lambda checkpoint: {}["mistake"])
    assert run.copy(1) == [
        f"mirror: {run.second} does not have step_000001: 'mistake'; it is tried again with the next checkpoint"
    ]


def test_the_best_is_copied_too_where_the_place_was_too_slow_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Copied(tmp_path, keep_checkpoints=1, keep_best="accuracy")
    waits, may_go_on = blocking(monkeypatch, "state.json")
    run.mirroring.saved(run.save(1, 0.1))
    assert waits.wait(60)
    for step, accuracy in ((2, 0.9), (3, 0.3)):
        run.mirroring.saved(run.save(step, accuracy))
    may_go_on.set()
    run.mirroring.wait()
    assert run.there == [2, 3]
    assert run.mirroring.figures()["checkpoint/mirrored_step"] == 3
    run.copy(4, 0.4)
    assert run.there == [2, 4]


def test_the_end_of_a_run_waits_for_the_last_copy_unless_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Copied(tmp_path, save_s=0.2)
    waits, may_go_on = blocking(monkeypatch, "state.json")
    run.mirroring.saved(run.save(1))
    assert waits.wait(60)
    run.mirroring.wait()
    assert run.mirroring.take_lines() == [f"mirror: {run.second} has not taken a byte for 0.2 s"]
    thread = run.mirroring._thread
    may_go_on.set()
    assert thread is not None
    thread.join(60)
    monkeypatch.undo()
    assert run.there == []  # it was given up
    run = Copied(tmp_path)
    waits, may_go_on = blocking(monkeypatch, "manifest.json")
    run.mirroring.saved(run.save(2))
    assert waits.wait(60)
    threading.Thread(target=may_go_on.set).start()
    run.mirroring.wait()
    assert run.there == [2]


def test_a_place_that_cannot_be_used_is_refused_at_the_start_but_ends_no_run_that_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "second").write_text("a file")
    sentence = f"run.mirror is '{tmp_path}/second', but it cannot be used: '{tmp_path}/second/run': Not a directory"
    for resume in ("never", "auto"):
        for is_restart in (False, True):
            run = Copied(tmp_path)
            with pytest.raises(MirrorError) as caught:  # and a restart that has nothing here may need what is there
                run.mirroring.fetch(resume, is_restart=is_restart)
            assert str(caught.value) == sentence
    run.save(3)
    with pytest.raises(MirrorError):
        run.mirroring.fetch("auto", is_restart=False)
    assert run.mirroring.fetch("auto", is_restart=True) == run.checkpoints.folder / "step_000003"
    (said,) = run.mirroring.take_lines()
    assert said.startswith(f"mirror: {run.second} cannot be used now: ")
    assert run.mirroring.figures()["checkpoint/mirror_failures"] == 1


def damage(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text('{"step": 9}')


@pytest.mark.parametrize(
    ("here", "there", "found", "spoil"),
    [
        ([2, 4], [4], 4, []),
        ([], [2, 4], 4, []),
        ([2], [4], 4, []),
        ([4], [2], 4, []),
        ([2, 4], [4], 4, ["runs/run/checkpoints/step_000004"]),
        ([2], [4], 2, ["second/run/checkpoints/step_000004"]),
        ([2], [3, 4], 3, ["second/run/checkpoints/step_000004", "runs/run/checkpoints/step_000002"]),
        ([], [], None, []),
        ([], [4], None, ["second/run/checkpoints/step_000004"]),
    ],
)
def test_auto_is_the_newest_sound_checkpoint_of_both_places(
    here: list[int], there: list[int], found: int | None, spoil: list[str], tmp_path: Path
) -> None:
    run = Copied(tmp_path, keep_checkpoints=0)
    for step in sorted({*here, *there}):
        checkpoint = run.save(step)
        if step in there:
            run.mirroring.mirror.send(checkpoint)
        if step not in here:
            shutil.rmtree(checkpoint)
    for folder in spoil:
        damage(tmp_path / folder)
    resumed = run.mirroring.fetch("auto", is_restart=False)
    assert resumed == (run.checkpoints.folder / f"step_{found:06d}" if found is not None else None)
    lines = run.mirroring.take_lines()
    assert sum("passed over" in line and "second" in line for line in lines) == sum("second" in folder for folder in spoil)
    fetched = found is not None and (found not in here or f"runs/run/checkpoints/step_{found:06d}" in spoil)
    assert sum(f"was fetched from the mirror {run.second}" in line for line in lines) == fetched
    assert run.checkpoints.resolve("auto") == resumed or found is None


def test_only_damaged_checkpoints_in_both_places_end_the_start(tmp_path: Path) -> None:
    run = Copied(tmp_path)
    run.mirroring.mirror.send(run.save(2))
    damage(run.second / "checkpoints" / "step_000002")
    damage(run.checkpoints.folder / "step_000002")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        run.mirroring.fetch("auto", is_restart=False)


def test_a_new_run_does_not_take_the_place_of_another_ones_copies(tmp_path: Path) -> None:
    run = Copied(tmp_path)
    assert run.mirroring.fetch("never", is_restart=False) is None
    run.copy(1)
    shutil.rmtree(run.folder)
    with pytest.raises(ConfigError) as caught:
        Copied(tmp_path).mirroring.fetch("never", is_restart=False)
    assert str(caught.value) == (
        f"run.name is 'run', but {run.second} already holds copies of a run; give this one another run.name or run.mirror, "
        "continue it with run.resume=auto, or remove them"
    )


def test_a_run_that_exports_its_model_is_brought_back_without_the_summary_that_says_it_is_done(tmp_path: Path) -> None:
    """The exported model is not copied: the run that is brought back exports again."""
    for export in (False, True):
        run = Copied(tmp_path / str(export), export=export)
        run.folder.mkdir(parents=True)
        for name in ("summary.json", "metrics.jsonl"):
            (run.folder / name).write_text("{}\n")
        run.copy(1)
        shutil.rmtree(run.folder)
        run.mirroring.fetch("auto", is_restart=False)
        assert (run.folder / "metrics.jsonl").exists()
        assert (run.folder / "summary.json").exists() != export


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[str], str]:
    def refused(mirror: str) -> str:
        with pytest.raises(ConfigError) as caught:
            Copied(tmp_path, mirror=mirror)
        return str(caught.value)

    return refused


def test_what_names_no_second_place_is_refused_with_what_is_allowed(refusal: Callable[[str], str], tmp_path: Path) -> None:
    allowed = "; it must be a folder outside run.folder, or s3://BUCKET/PREFIX with a bucket that is there"
    for mirror in ("", "s3://", "s3:///runs", "gs://bucket/runs", "https://bucket/runs", "s3://bucket/runs?region=x"):
        assert refusal(mirror) == f"run.mirror is '{mirror}'{allowed}"
    for mirror in (f"{tmp_path}/runs", f"{tmp_path}/runs/second"):
        assert refusal(mirror) == f"run.mirror is '{mirror}', which is in run.folder, '{tmp_path}/runs'{allowed}"
    said = refusal("s3://AKIA0123456789ABCDEF:hunter2@bucket/runs")
    assert "hunter2" not in said
    assert said == (
        "run.mirror is 's3://(hidden)@bucket/runs', which has a key in it; it must be without; AWS_* variables have it"
    )
