"""A run's checkpoint is whole, or it is said what is wrong with it and the one before is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.checkpoint import CheckpointFolder
from megarl.checkpoint.manifest import MANIFEST, check
from megarl.checkpoint.run_checkpoint import read_state, write_state
from megarl.errors import CheckpointError

FILES = ("policy/__0_0.distcp", "policy/__1_0.distcp", "policy/.metadata", "critic/__0_0.distcp", "state.json")


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    """Steps 1 to 3, each with two roles' files and the driver's state."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        with folder.writing(step) as path:
            for number, name in enumerate(FILES[:-1]):
                (path / name).parent.mkdir(exist_ok=True)
                (path / name).write_bytes(random.Random(number).randbytes(5000 * number))  # one of them is empty
            write_state(path, {"step": step})
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


def test_what_failed_on_the_way_is_not_there_and_nothing_else_is_lost(checkpoints: CheckpointFolder) -> None:
    def fail(path: Path) -> None:
        (path / "policy").mkdir()
        (path / "policy" / "__0_0.distcp").write_bytes(b"half")
        raise OSError("No space left on device")

    attempts: list[tuple[int, Callable[[Path], None]]] = [(3, fail), (4, fail)]
    for step, attempt in attempts:
        with pytest.raises(OSError, match="No space"), checkpoints.writing(step) as path:
            attempt(path)
    assert [path.name for path in checkpoints.all()] == ["step_000001", "step_000002", "step_000003"]
    assert {path.name for path in checkpoints.folder.iterdir()} == {path.name for path in checkpoints.all()}
    check(checkpoints.all()[-1])


def test_the_newest_are_kept(checkpoints: CheckpointFolder) -> None:
    checkpoints.keep = 2
    with checkpoints.writing(4) as path:
        write_state(path, {"step": 4})
    assert [path.name for path in checkpoints.all()] == ["step_000003", "step_000004"]
