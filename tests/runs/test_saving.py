"""A checkpoint that is written in the background is there when all of it is, holds what was saved, or says why it is not."""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from megarl.checkpoint import background
from megarl.checkpoint.background import BackgroundWriter
from megarl.checkpoint.dist_writer import Written, join_roles, join_shards, write_shards
from megarl.config import parse_config
from megarl.core.run import Run
from megarl.errors import CheckpointError, ConfigError, RewardError, RunInterrupted, RunStopped, WorkerError
from megarl.megatron.shards import ShardBox, Shards
from megarl.observe.run_state import RankCondition
from megarl.runs.manifest import check
from megarl.runs.provenance import commit
from megarl.runs.run_checkpoint import CheckpointFolder, read_state
from megarl.runs.saving import Saving, unwritable
from megarl.runs.training_side import JoinFiles
from megarl.version import __version__
from megarl.weights.placement import Bundle, Placement

WHOLE = torch.arange(24.0).view(6, 4)


def part(rank: int, value: torch.Tensor = WHOLE) -> Shards:
    """Rows 0 to 3, or 3 to 6, of a tensor, and an object of each rank's own."""
    rows = value[3 * rank : 3 * rank + 3].view(-1)
    box = ShardBox("weight", (6, 4), (3 * rank, 0), (3, 4), rows)
    return Shards(rank, [box], {f"object/shard_{rank}_2": b"0123456789"}, {"step": 1} if rank == 0 else None)


class TwoRanks:
    """`Roles` of two ranks that share this process."""

    device = "Processor of a test"

    def __init__(self) -> None:
        self.weight = WHOLE.clone()
        self.writers = [BackgroundWriter(), BackgroundWriter()]
        self.groups = {"policy": self}

    def any_rank(self, flag: bool) -> bool:
        return flag

    def states(self) -> list[RankCondition]:
        return ["up", "up"]

    def save(self, folder: str) -> None:
        for rank, writer in enumerate(self.writers):
            writer.begin("policy", part(rank, self.weight), f"{folder}/policy")

    def saved(self, *, wait: bool) -> JoinFiles | None:
        for writer in self.writers if wait else ():  # one that still writes when the other has failed makes its folder anew
            with suppress(CheckpointError, OSError):
                writer.result("policy", wait=True)
        parts = [writer.result("policy", wait=wait) for writer in self.writers]
        written = [one for one in parts if one is not None]
        return partial(join_roles, {"policy": written}) if len(written) == len(parts) else None


def loaded(folder: Path) -> torch.Tensor:
    state = {"weight": torch.full((6, 4), torch.nan)}
    load(state, storage_reader=FileSystemReader(folder / "policy"), no_dist=True)
    return state["weight"]


@pytest.fixture
def saving(tmp_path: Path) -> Saving:
    return Saving(CheckpointFolder(tmp_path / "checkpoints"), "run: {steps: 5}\n", leads=True)


def save(saving: Saving, roles: Any, step: int) -> None:
    saving.begin(roles, step, {"step": step}, {"weight_version": step})
    assert saving.finish(roles, wait=True)


def test_a_checkpoint_is_there_when_all_of_it_is_and_holds_what_was_saved(
    saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, roles = threading.Event(), TwoRanks()

    def late(shards: Shards, folder: str) -> Written:
        assert shards.rank == 0 or may_write.wait(30)
        return write_shards(shards, folder)

    monkeypatch.setattr(background, "write_shards", late)
    saving.begin(roles, 1, {"step": 1}, {})  # type: ignore[arg-type]
    roles.weight.fill_(-1.0)
    roles.writers[0].result("policy", wait=True)
    assert not saving.finish(roles, wait=False)  # type: ignore[arg-type]
    assert saving.is_under_way
    assert saving.checkpoints.all() == []
    assert saving.checkpoints.resolve("auto") is None
    may_write.set()
    assert saving.finish(roles, wait=True)  # type: ignore[arg-type]
    assert not saving.is_under_way
    (sealed,) = saving.checkpoints.all()
    check(sealed)
    assert read_state(sealed) == {"step": 1}
    assert (sealed / "config.yaml").read_text() == saving.config_text
    assert torch.equal(loaded(sealed), WHOLE)


def assert_told_and_nothing_lost(saving: Saving, roles: Any, step: int, file: str, why: str) -> None:
    before = saving.checkpoints.all()
    with pytest.raises(CheckpointError) as caught:
        save(saving, roles, step)
    said = str(caught.value)
    assert f"the checkpoint of step {step} was not saved: " in said
    assert f"{file}" in said
    assert why in said
    assert said.endswith(f"run.resume=auto continues from {before[-1]}")
    assert "\n" not in said
    assert not saving.is_under_way
    assert sorted(saving.checkpoints.folder.iterdir()) == before
    assert saving.checkpoints.resolve("auto") == before[-1]


@pytest.mark.parametrize("file", ["policy/__1_0.distcp", "policy/common.pt", "policy/.metadata", "state.json"])
def test_a_full_disk_is_told_with_the_file_and_older_checkpoints_stay(
    saving: Saving, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles, begin = TwoRanks(), CheckpointFolder.begin
    save(saving, roles, 1)

    def on_a_full_disk(folder: CheckpointFolder, step: int) -> Path:
        path = begin(folder, step)
        (path / "policy").mkdir()
        (path / file).symlink_to("/dev/full")
        return path

    monkeypatch.setattr(CheckpointFolder, "begin", on_a_full_disk)
    named = Path(file).name if "policy/_" in file else ".writing_step_000002"
    assert_told_and_nothing_lost(saving, roles, 2, named, "No space left on device")
    monkeypatch.undo()
    save(saving, roles, 3)
    assert saving.checkpoints.resolve("auto") == saving.checkpoints.all()[-1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_and_one_that_turns_read_only_cost_the_checkpoint_under_way_alone(small_disk: Path) -> None:
    saving, roles = Saving(CheckpointFolder(small_disk / "checkpoints"), "{}", leads=True), TwoRanks()
    save(saving, roles, 1)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    assert_told_and_nothing_lost(saving, roles, 2, ".writing_step_000002", "No space left on device")
    ballast.unlink()
    save(saving, roles, 3)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert unwritable(small_disk) == unwritable(small_disk / "runs") == "Read-only file system"
    assert_told_and_nothing_lost(saving, roles, 4, str(saving.checkpoints.temporary(4)), "Read-only file system")
    assert torch.equal(loaded(saving.checkpoints.all()[-1]), WHOLE)


def test_every_damage_is_seen_and_the_one_before_is_used(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    corruption = importlib.import_module("corruption")
    monkeypatch.setattr(corruption, "TRUNCATIONS", 5)
    monkeypatch.setattr(corruption, "FLIPS", 40)
    for step in (1, 2):
        save(saving, TwoRanks(), step)
    counts = corruption.damage_all(saving.checkpoints)
    assert counts["files"] == 8  # two parts, common.pt, .metadata, metadata.json, state.json, config.yaml, manifest.json
    assert counts["truncated"] == 5 * 8
    assert counts["flipped"] > 30 * 8
    assert counts["detected"] == counts["recovered"] == counts["truncated"] + counts["flipped"]


def test_parts_that_do_not_make_whole_tensors_are_refused(tmp_path: Path) -> None:
    first, second = write_shards(part(0), tmp_path), write_shards(part(1), tmp_path)
    for parts in ([first], [first, first, second]):
        with pytest.raises(CheckpointError, match="elements of 'weight', of which there are 24"):
            join_shards(tmp_path, parts)
    join_shards(tmp_path, [second, first])


class Interrupted(Run):
    """A run whose checkpoint is under way when something goes wrong."""

    shown: ClassVar = {}
    trouble: ClassVar[dict[str, Exception]] = {}

    def start(self) -> None:
        if "at the start" in self.trouble:
            raise self.trouble["at the start"]
        self.roles: Any = TwoRanks()
        self._stack.callback(lambda: self.roles.saved(wait=True) if self.saving.is_under_way else None)  # they end

    def measure(self) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass

    def go_to_row(self, state: dict[str, Any]) -> list[str]:
        return []

    def gates(self) -> dict[str, float | None]:
        return {}


SETTINGS = {"model": {"path": "model"}, "data": {"train": {"name": "chain_sum"}}, "rewards": [{"name": "exact_number"}]}


def interrupted(tmp_path: Path) -> Interrupted:
    return Interrupted(parse_config({**SETTINGS, "run": {"folder": str(tmp_path)}}))


def test_drivers_of_one_world_meet_when_the_leader_has_done_its_part_and_share_its_failure(saving: Saving) -> None:
    """Under torchrun every rank drives: none may write before the folder is there, or leave before the name is given."""
    met: list[list[str]] = []

    class Driven(TwoRanks):
        def any_rank(self, flag: bool) -> bool:
            met.append(sorted(path.name for path in saving.checkpoints.folder.iterdir()))
            return flag

    save(saving, Driven(), 1)
    assert met == [[".writing_step_000001"], ["step_000001"]]

    class Failed(TwoRanks):
        def any_rank(self, flag: bool) -> bool:
            return True

        def save(self, folder: str) -> None:
            raise AssertionError("nobody writes into a folder that the leader could not make")

    follower = Saving(saving.checkpoints, saving.config_text, leads=False)
    with pytest.raises(CheckpointError, match="step 2 was not saved: the leading rank could not write its part"):
        save(follower, Failed(), 2)
    assert [path.name for path in saving.checkpoints.folder.iterdir()] == ["step_000001"]


def test_a_run_that_fails_for_another_reason_finishes_its_checkpoint_first(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no such thing"), interrupted(tmp_path) as run:
        run.saving.begin(run.roles, 1, {"step": 1}, {})
        raise RewardError("no such thing")
    assert [path.name for path in run.checkpoints.folder.iterdir()] == ["step_000001"]


def test_a_run_that_lost_a_rank_does_not_wait_for_it_and_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WorkerError), interrupted(tmp_path) as run:
        run.saving.begin(run.roles, 1, {"step": 1}, {})
        raise WorkerError("rank 1 is gone")
    assert list(run.checkpoints.folder.iterdir()) == []


def test_a_run_that_is_interrupted_says_from_where_it_can_be_continued(tmp_path: Path) -> None:
    with pytest.raises(RunInterrupted) as caught, interrupted(tmp_path) as run:
        run.step = 3
        raise KeyboardInterrupt
    assert str(caught.value) == (
        f"interrupted after step 3 of 100; there is no checkpoint in {tmp_path}/run/checkpoints, so run.resume=auto would "
        "begin anew"
    )
    with pytest.raises(RunInterrupted) as caught, interrupted(tmp_path) as run:
        save(run.saving, run.roles, 7)
        run.step = 8
        raise KeyboardInterrupt
    assert str(caught.value) == (
        f"interrupted after step 8 of 100; run.resume=auto continues from the newest checkpoint, {tmp_path}/run/checkpoints/"
        "step_000007"
    )


def test_a_run_says_from_its_start_on_what_and_by_what_it_is_computed_and_why_it_ended_early(tmp_path: Path) -> None:
    machine, end = tmp_path / "run" / "machine.json", tmp_path / "run" / "end.json"
    bundles = tuple(Bundle("a", gpu) for gpu in range(3))
    for error, told in (
        (RewardError("no such thing"), {"state": "failed", "why": "no such thing"}),
        (ValueError(), {"state": "failed", "why": "ValueError"}),
        (RunStopped("stopped by SIGUSR1"), {"state": "interrupted", "why": "stopped by SIGUSR1"}),
        (KeyboardInterrupt(), {"state": "interrupted", "why": "Ctrl-C"}),
    ):
        raised = RunInterrupted if isinstance(error, KeyboardInterrupt) else type(error)
        with pytest.raises(raised), interrupted(tmp_path) as run:
            assert not end.exists(), "an earlier attempt's"
            made = json.loads(machine.read_text())
            assert (made["machine"]["cores"], made["versions"]["megarl"]) == (len(os.sched_getaffinity(0)), __version__)
            assert (made["commit"], made["gpu"]) == (commit(), "Processor of a test")
            run.tell_placement(Placement(bundles, {"policy": (0, 1)}, ((2,),)))
            assert json.loads(machine.read_text()) == made | {"gpus": 3}
            raise error
        assert json.loads(end.read_text()) == told
    with interrupted(tmp_path):
        pass
    assert not end.exists()
    end.write_text("of another run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds a run"), interrupted(tmp_path):
        pass
    assert end.read_text() == "of another run"


def test_a_checkpoint_is_written_after_so_many_minutes_whatever_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("megarl.core.run.time.monotonic", lambda: now)
    with interrupted(tmp_path) as run:
        for minutes, saved in ((29.9, []), (30.0, [2]), (59.9, [2]), (60.0, [2, 4])):
            now = 1000.0 + 60 * minutes
            run.step += 1
            run.save_if_due()
            run.saving.finish(run.roles, wait=True)
            assert [int(path.name.rpartition("_")[2]) for path in run.checkpoints.all()] == saved


@pytest.mark.parametrize(
    ("epochs", "rows", "per_step", "steps"), [(15, 1000, 8, 1875), (1, 7, 2, 4), (0.5, 100, 8, 7), (0.1, 70, 7, 1)]
)
def test_epochs_are_passes_over_the_rows(tmp_path: Path, epochs: float, rows: int, per_step: int, steps: int) -> None:
    run = interrupted(tmp_path)
    given = parse_config({**SETTINGS, "run": {"folder": str(tmp_path), "epochs": epochs}})
    config = run.count_epochs(given, rows, per_step)
    run.step = steps - 1
    assert not run.finished
    run.step = steps
    assert run.finished
    assert config.run.steps == steps
    assert f"steps: {steps}\n" in run.saving.config_text
    assert run.count_epochs(config.model_copy(deep=True), rows, per_step) == config  # as a resumed run counts


def test_a_finished_run_with_a_foreign_summary_says_so_and_without_one_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted(tmp_path) as run:
        summary = run.folder / "summary.json"
        summary.write_text('{"name": "package"}')
        run.was_finished = True
        with pytest.raises(CheckpointError, match=r"summary\.json is damaged or no summary of a run .*; remove it, and"):
            run.finish()
        assert summary.read_text() == '{"name": "package"}'
        summary.unlink()
        run.was_finished = run.finished and summary.exists()
        monkeypatch.setattr(run.timeline, "record", lambda step, roles: {})
        written = run.finish()
        run.was_finished = True
        assert run.finish() == json.loads(summary.read_text()) == written


def test_a_run_says_its_batch_arithmetic_only_once_its_folder_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with interrupted(tmp_path):
        pass
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    batch = [" ".join(row) for row in parse_config(SETTINGS).batch_rows()]
    assert lines[: len(batch)] == batch
    assert batch[0] == "prompts per step 8"
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds a run"), interrupted(tmp_path):
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("megarl.core.run.is_restart", lambda: True)  # said when the run was started first
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with interrupted(tmp_path):
        pass
    assert batch[0] not in " ".join(capsys.readouterr().out.split())


def test_an_evaluation_is_told_behind_its_step_with_its_reward_and_the_end_says_where_everything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = iter([{"reward": 0.385, "accuracy": 0.0}, {"reward": 0.4625, "accuracy": 0.09375}])
    monkeypatch.setattr(Interrupted, "measure", lambda self: next(figures))
    run = Interrupted(parse_config({**SETTINGS, "run": {"folder": str(tmp_path), "steps": 1}}))
    with run:
        run.timeline.record = lambda step, roles: {}  # type: ignore[method-assign]
        run.evaluate("before")
        with run.phases.step():
            pass
        run.step = 1
        run.evaluate_if_due()
        run.log({})
        run.save_if_due()
        run.finish()
    said = [line for line in capsys.readouterr().out.splitlines() if line[:1].isalpha()]
    beginnings = [line.split(":")[0].split("  ")[0] for line in said]
    first = beginnings.index("evaluation before")
    assert beginnings[first : first + 3] == ["evaluation before", "step 1/1", "evaluation after"]
    folder = tmp_path / "run"
    for line in (
        "held-out reward: 0.385 before, 0.4625 after 1 step",
        "held-out accuracy: 0.0% before, 9.4% after 1 step",
        f"done: {folder}",
        f"to see it: megarl report {folder}",
        f"newest checkpoint: {folder}/checkpoints/step_000001",
    ):
        assert line in said


def test_the_evaluation_before_training_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupted, "measure", lambda self: pytest.fail("it was measured"))
    with Interrupted(parse_config({**SETTINGS, "run": {"folder": str(tmp_path), "eval_before": False}})) as run:
        run.evaluate("before")
        assert run.evaluations["before"] is None


@pytest.mark.parametrize("at_the_start", [True, False])
def test_a_disk_that_is_full_for_metrics_and_samples_is_one_sentence(
    tmp_path: Path, at_the_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    monkeypatch.setattr(Interrupted, "trouble", {"at the start": error} if at_the_start else {})
    with pytest.raises(CheckpointError) as caught, interrupted(tmp_path):
        raise error
    assert str(caught.value) == (
        "'metrics.jsonl' cannot be written to (No space left on device); once it can, run.resume=auto continues from the "
        "newest checkpoint"
    )


def test_a_run_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError) as caught, interrupted(tmp_path):
        pass
    assert f"nothing can be written to {tmp_path}/run (File exists)" in str(caught.value)
