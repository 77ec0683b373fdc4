"""A run's checkpoint is whole, or it is said what is wrong with it and the one before is used."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import xxhash

import megarl
from megarl.errors import CheckpointError
from megarl.runs.manifest import MANIFEST, FileRecord, check, made_by
from megarl.runs.provenance import code_differences, provenance
from megarl.runs.run_checkpoint import CheckpointFolder, read_state, write_state

FILES = ("policy/__0_0.distcp", "policy/__1_0.distcp", "policy/.metadata", "critic/__0_0.distcp", "state.json")


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    """Steps 1 to 3, each with two roles' files and the driver's state."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        path = folder.begin(step)
        for number, name in enumerate(FILES[:-1]):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(random.Random(number).randbytes(5000 * number))  # one of them is empty
        write_state(path, {"step": step})
        folder.commit(step)
    return folder


def places(size: int, count: int) -> list[int]:
    """`count` places in a file of `size` bytes, its ends among them."""
    return sorted({0, size - 1, *random.Random(size).sample(range(size), min(count, size))}) if size else []


def test_a_sealed_checkpoint_is_sound_wherever_it_is_moved(checkpoints: CheckpointFolder, tmp_path: Path) -> None:
    for path in checkpoints.all():
        check(path)
    shutil.copytree(checkpoints.all()[0], tmp_path / "elsewhere")
    assert checkpoints.resolve(str(tmp_path / "elsewhere")) == tmp_path / "elsewhere"
    assert checkpoints.resolve("auto") == checkpoints.all()[-1]
    assert checkpoints.resolve("never") is None
    assert checkpoints.damaged == []


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_every_bit_flipped_and_every_byte_cut_off_is_seen_and_the_file_named(checkpoints: CheckpointFolder, name: str) -> None:
    folder = checkpoints.all()[-1]
    whole = (folder / name).read_bytes()
    for place in places(len(whole), 200):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << random.Random(place).randrange(8)
        (folder / name).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=Path(name).name):
            check(folder)
    for length in places(len(whole), 20):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=Path(name).name):
            check(folder)
    (folder / name).write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=Path(name).name):
        check(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=Path(name).name):
        check(folder)
    (folder / name).write_bytes(whole)
    check(folder)


def test_a_file_that_nobody_wrote_is_seen(checkpoints: CheckpointFolder) -> None:
    (checkpoints.all()[-1] / "policy" / "__2_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="__2_0"):
        check(checkpoints.all()[-1])


def test_auto_takes_the_newest_sound_one_and_says_what_it_passed_over(checkpoints: CheckpointFolder) -> None:
    oldest, middle, newest = checkpoints.all()
    (newest / MANIFEST).unlink()
    (middle / "policy" / "__1_0.distcp").write_bytes(bytes(5000))
    assert checkpoints.resolve("auto") == oldest
    assert read_state(oldest) == {"step": 1}
    assert [path in sentence for path, sentence in zip((str(newest), str(middle)), checkpoints.damaged, strict=True)] == [
        True
    ] * 2
    with pytest.raises(CheckpointError, match="__1_0"):
        checkpoints.resolve(str(middle))
    shutil.rmtree(oldest / "critic")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged; the newest: .*step_000003"):
        checkpoints.resolve("auto")


def test_what_was_not_committed_is_not_there_and_nothing_else_is_lost(checkpoints: CheckpointFolder) -> None:
    for step in (3, 4):
        (checkpoints.begin(step) / "state.json").write_bytes(b"half")
    assert [path.name for path in checkpoints.all()] == ["step_000001", "step_000002", "step_000003"]
    assert checkpoints.resolve("auto") == checkpoints.all()[-1]
    checkpoints.abandon(3)
    assert not checkpoints.temporary(3).exists()
    checkpoints.remove_unfinished()
    assert {path.name for path in checkpoints.folder.iterdir()} == {path.name for path in checkpoints.all()}
    check(checkpoints.all()[-1])


def test_a_file_shorter_than_it_was_meant_to_be_is_not_sealed(checkpoints: CheckpointFolder) -> None:
    path = checkpoints.begin(4)
    (path / "part").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"part' has 3 bytes, but 4 were written"):
        checkpoints.commit(4, written={"part": FileRecord(4, "0" * 32)})
    assert [path.name for path in checkpoints.all()] == ["step_000001", "step_000002", "step_000003"]


def test_a_checksum_that_its_writer_took_is_the_one_that_is_checked(checkpoints: CheckpointFolder) -> None:
    path = checkpoints.begin(4)
    (path / "part").write_bytes(b"abcd")  # the disk has other bytes than were meant to be there
    sealed = checkpoints.commit(4, written={"part": FileRecord(4, xxhash.xxh3_128_hexdigest(b"abce"))})
    with pytest.raises(CheckpointError, match="part' is damaged"):
        check(sealed)
    (sealed / "part").write_bytes(b"abce")
    check(sealed)


def test_the_newest_are_kept(checkpoints: CheckpointFolder) -> None:
    checkpoints.keep = 2
    checkpoints.begin(4)
    checkpoints.commit(4)
    assert [path.name for path in checkpoints.all()] == ["step_000003", "step_000004"]


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 2), ("loss", 4)])
def test_the_best_is_kept_besides_the_newest(tmp_path: Path, metric: str, best: int) -> None:
    figures = {1: 0.3, 2: 0.7, 3: 0.6, 4: 0.2, 5: 0.5, 6: None, 7: 0.25}
    folder, kept = CheckpointFolder(tmp_path, keep=2, best=metric), []
    for step, figure in figures.items():
        folder.begin(step)
        folder.commit(step, evaluation=None if figure is None else {metric: figure, "seconds": 1.0})
        kept.append([int(path.name[5:]) for path in folder.all()])
    assert kept[-1] == [best, 6, 7]
    assert folder.best_checkpoint() == folder.folder / f"step_{best:06d}"
    folder.best = None
    folder.begin(8)
    folder.commit(8)
    assert [int(path.name[5:]) for path in folder.all()] == [7, 8]


def test_names_and_order_come_from_steps_whatever_the_clock_says(checkpoints: CheckpointFolder) -> None:
    for age, path in enumerate(checkpoints.all()):  # the newest looks the oldest, and from 1970
        os.utime(path, (10.0 - age, 10.0 - age))
    assert checkpoints.resolve("auto") == checkpoints.folder / "step_000003"
    checkpoints.keep = 1
    checkpoints.begin(10)
    checkpoints.commit(10)
    assert [path.name for path in checkpoints.all()] == ["step_000010"]


def test_a_manifest_says_what_made_the_checkpoint_and_what_differs_now(tmp_path: Path) -> None:
    before = "run: {steps: 2, resume: never}\nmodel: {path: a}\n"
    folder = CheckpointFolder(tmp_path)
    folder.begin(7)
    made = made_by(folder.commit(7, provenance(before, 7, 6)))
    assert (made["step"], made["weight_version"], made["megarl"]) == (7, 6, megarl.__version__)
    assert made["config_sha256"] == hashlib.sha256(before.encode()).hexdigest()
    assert made["torch"] == version("torch")
    assert code_differences(made, provenance(before, 7, None)) == []
    other = {**made, "megarl": "0.0.1", "commit": None}
    (said,) = code_differences(other, {**made, "commit": "abc"})
    assert said == (f"the checkpoint was written by megarl 0.0.1, now {megarl.__version__}; commit of unknown origin, now abc")
