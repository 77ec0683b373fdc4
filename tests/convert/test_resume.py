"""A conversion that is cut short: shards, workers, kills, other commands, full disks; the target is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.config.layout import Layout
from megarl.convert import run as convert_run
from megarl.convert.journal import Journal
from megarl.convert.plan import plan_dist
from megarl.convert.run import run_plan
from megarl.convert.sources import open_hf
from megarl.errors import CheckpointError, OwnerError
from tests.convert.conftest import exported, imported

LAYOUT = Layout(tp=2, pp=2)
EXPERTS = Layout(tp=2, pp=2, ep=2)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file but the record, which names the source folder as it was spelt."""
    names = [path for path in folder.rglob("*") if path.is_file() and path.name != "megarl_conversion.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


@pytest.fixture
def whole(families: Callable[[str], Path], tmp_path: Path) -> dict[str, bytes]:
    """The files of an import that nothing disturbed."""
    imported(families("mixtral"), tmp_path / "whole", EXPERTS)
    return files_of(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_in_any_order_make_what_one_command_makes(
    families: Callable[[str], Path], tmp_path: Path, whole: dict[str, bytes], workers: int
) -> None:
    outcomes = {}
    for index in (2, 0, 1):
        outcomes[index] = imported(families("mixtral"), tmp_path / "dist", EXPERTS, shard=(index, 3), workers=workers)
        assert (tmp_path / "dist").exists() == (index == 1)
    assert [outcomes[i].waiting_for for i in (2, 0, 1)] == [(0, 1), (1,), ()]
    assert all(outcome.bytes_written > 0 for outcome in outcomes.values())
    assert files_of(tmp_path / "dist") == whole
    assert list(tmp_path.glob(".dist*")) == []


def test_an_export_in_shards_is_the_same_folder(families: Callable[[str], Path], tmp_path: Path) -> None:
    imported(families("llama"), tmp_path / "dist", LAYOUT)
    exported(tmp_path / "dist", tmp_path / "one", max_shard_bytes=20_000)
    for index in range(2):
        exported(tmp_path / "dist", tmp_path / "two", max_shard_bytes=20_000, shard=(index, 2))
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def test_the_same_command_keeps_what_is_done_and_writes_only_the_rest(
    families: Callable[[str], Path], tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        imported(families("mixtral"), tmp_path / "dist", EXPERTS)
    assert not (tmp_path / "dist").exists()
    staging = tmp_path / ".dist.converting"
    assert not any((staging / name).exists() for name in (".metadata", "metadata.json", "common.pt"))
    monkeypatch.undo()
    outcome = imported(families("mixtral"), tmp_path / "dist", EXPERTS)
    plan = plan_dist("import", open_hf(families("mixtral")), EXPERTS, None)
    assert outcome.bytes_kept == sum(task.nbytes for task in plan.tasks[:5])
    assert outcome.bytes_written == sum(task.nbytes for task in plan.tasks[5:])
    assert files_of(tmp_path / "dist") == whole


def test_what_was_done_but_has_changed_on_disk_is_done_again(
    families: Callable[[str], Path], tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        imported(families("mixtral"), tmp_path / "dist", EXPERTS)
    monkeypatch.undo()
    plan = plan_dist("import", open_hf(families("mixtral")), EXPERTS, None)
    extent = plan.tasks[2].target.extents[0]
    with (tmp_path / ".dist.converting" / extent.file).open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"\xff")
    outcome = imported(families("mixtral"), tmp_path / "dist", EXPERTS)
    assert outcome.bytes_kept == sum(plan.tasks[number].nbytes for number in (0, 1, 3, 4))
    assert files_of(tmp_path / "dist") == whole


def test_another_command_does_not_continue_it(
    families: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in families("llama").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        imported(source, tmp_path / "dist", LAYOUT)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"whose source is '.*source', but this command's is '.*qwen2'"):
        imported(families("qwen2"), tmp_path / "dist", LAYOUT)
    with pytest.raises(CheckpointError, match="whose number of shards is 1, but this command's is 2"):
        imported(source, tmp_path / "dist", LAYOUT, shard=(0, 2))
    for change in ("layout", "dtype", "file"):
        with pytest.raises(CheckpointError, match="with other options, or whose source has changed since"):
            if change == "file":
                os.utime(source / "model.safetensors", ns=(1, 1))
            imported(
                source, tmp_path / "dist", Layout(tp=4) if change == "layout" else LAYOUT, "bf16" if change == "dtype" else None
            )
    assert not (tmp_path / "dist").exists()


def test_a_target_that_is_there_is_not_touched(families: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    imported(families("llama"), tmp_path / "dist", LAYOUT)  # an empty folder may be filled
    before = files_of(tmp_path / "dist")
    with pytest.raises(CheckpointError, match="exists already; name a new or an empty folder"):
        imported(families("llama"), tmp_path / "dist", LAYOUT)
    assert files_of(tmp_path / "dist") == before
    assert list(tmp_path.glob(".dist*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_command_that_was_killed_is_continued_to_the_same_bytes(
    families: Callable[[str], Path], tmp_path: Path, whole: dict[str, bytes], workers: str
) -> None:
    slow = "import time, megarl.convert.run as r\nrun = r.run_task\n"
    slow += "r.run_task = lambda *a: (time.sleep(0.05), run(*a))[1]\nimport sys\nfrom megarl.cli import main\nsys.exit(main())"
    arguments = ["convert", "import", str(families("mixtral")), str(tmp_path / "dist"), "--layout", "tp=2,pp=2,ep=2"]
    arguments += ["--workers", workers]
    process = subprocess.Popen([sys.executable, "-c", slow, *arguments], env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    journal = tmp_path / ".dist.converting" / "journal-0-of-1.jsonl"
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.read_text().count("\n") < 6:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "dist").exists()
    assert cli.main(arguments) == 0
    assert files_of(tmp_path / "dist") == whole
    assert list(tmp_path.glob(".dist*")) == []


def test_a_journal_that_a_kill_cut_at_any_byte_goes_on_with_its_whole_lines(
    families: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next task's line stood behind half of one, so that it and all after it were done again once more."""
    plan = plan_dist("import", open_hf(families("llama")), LAYOUT, None)
    journal = Journal(plan, tmp_path / "dist", 0, 1)
    with journal.opened():
        for task in range(4):
            journal.add(task, [f"{task}"])
    whole = journal.path(0).read_bytes()
    draw = random.Random(0)
    for _ in range(25):
        end = draw.randrange(len(whole) + 1)
        journal.path(0).write_bytes(whole[:end])
        with journal.opened():
            journal.add(9, ["nine"])
        tasks = max(0, whole[:end].count(b"\n") - 1)
        assert journal.done() == {**{task: [f"{task}"] for task in range(tasks)}, 9: ["nine"]}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_a_sentence_and_room_lets_it_go_on(
    families: Callable[[str], Path], tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    written = 0

    def full(descriptor: int, content: Any, offset: int, pwrite: Any = os.pwrite) -> int:
        nonlocal written
        written += len(content)
        if written > 40_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left on device; make room and run the same command again"):
        imported(families("mixtral"), tmp_path / "dist", EXPERTS, workers=workers)
    monkeypatch.undo()
    assert not (tmp_path / "dist").exists()
    imported(families("mixtral"), tmp_path / "dist", EXPERTS, workers=workers)
    assert files_of(tmp_path / "dist") == whole


def test_a_disk_without_room_is_seen_before_anything_is_written(
    families: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(convert_run.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"has 1\.00 MiB free, but the conversion needs 64\.\d+ MiB more"):
        imported(families("llama"), tmp_path / "dist", LAYOUT)
    assert not list(tmp_path.rglob("*.distcp"))


def test_a_worker_that_dies_is_named_and_its_work_is_done_by_the_next_command(
    families: Callable[[str], Path], tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, parent = convert_run.run_task, os.getpid()

    def dying(task: Any, *rest: Any) -> Any:
        if os.getpid() != parent and task.target.name.endswith("router.weight"):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(task, *rest)

    monkeypatch.setattr(convert_run, "run_task", dying)
    with pytest.raises(CheckpointError, match="a worker was killed by SIGKILL; the same command continues"):
        imported(families("mixtral"), tmp_path / "dist", EXPERTS, workers=2)
    monkeypatch.undo()
    imported(families("mixtral"), tmp_path / "dist", EXPERTS)
    assert files_of(tmp_path / "dist") == whole


@pytest.mark.slow
def test_two_commands_do_not_write_one_shard_at_once_and_the_second_names_the_first(
    families: Callable[[str], Path], tmp_path: Path
) -> None:
    from megarl.convert.journal import Journal

    plan = plan_dist("import", open_hf(families("llama")), LAYOUT, None)
    with Journal(plan, tmp_path / "dist", 0, 1).opened():
        with pytest.raises(OwnerError) as refused:
            run_plan(plan, tmp_path / "dist")
        said = f"another command is at work on shard 0 of 1 of '{tmp_path / 'dist'}': process {os.getpid()} of "
        assert str(refused.value).startswith(said)
        assert f"`kill {os.getpid()}`" in str(refused.value)
    assert run_plan(plan, tmp_path / "dist").finished
    assert [path.name for path in (tmp_path / "dist").glob("*owner*")] == []


@pytest.mark.slow
def test_a_conversion_that_was_taken_over_ends_before_it_writes_further(
    families: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.runs.owner.BEAT_S", 0.0)
    run, staging = convert_run.run_task, tmp_path / ".dist.converting"

    def robbed(*arguments: Any) -> Any:
        (staging / "owner-0-of-1.json").unlink(missing_ok=True)
        return run(*arguments)

    monkeypatch.setattr(convert_run, "run_task", robbed)
    with pytest.raises(OwnerError, match="was removed"):
        imported(families("llama"), tmp_path / "dist", LAYOUT)
    assert not (tmp_path / "dist").exists()


def test_merging_into_a_folder_that_another_command_writes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megarl.runs.owner import writing

    with writing(tmp_path / "out"):
        arguments = ["convert", "merge", "--base", "a", "--adapter", "b", "--out", str(tmp_path / "out")]
        assert cli.main(arguments) == 2
    assert f"another command is at work on '{tmp_path / 'out'}': process {os.getpid()} of" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_record_names_source_layout_and_a_checksum_for_every_chunk(families: Callable[[str], Path], tmp_path: Path) -> None:
    imported(families("llama"), tmp_path / "dist", LAYOUT)
    record = json.loads((tmp_path / "dist" / "megarl_conversion.json").read_text())
    assert record["made_by"] == "megarl convert import"
    assert record["layout"] == {"tp": 2, "pp": 2}
    plan = plan_dist("import", open_hf(families("llama")), LAYOUT, None)
    assert list(record["xxh3_64"]) == [name for task in plan.tasks for name in task.names]


def stop_after(monkeypatch: pytest.MonkeyPatch, tasks: int) -> None:
    """Ctrl-C when so many tasks are done."""
    run, done = convert_run.run_task, 0

    def counted(*arguments: Any) -> Any:
        nonlocal done
        if done == tasks:
            raise KeyboardInterrupt
        done += 1
        return run(*arguments)

    monkeypatch.setattr(convert_run, "run_task", counted)
