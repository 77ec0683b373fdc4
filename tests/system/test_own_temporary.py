"""What a run leaves in the temporary folder: nothing, however it ends, but for caches that later runs use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.system import own_temporary
from megarl.system.own_temporary import LONGEST_SOCKET, RAY_SOCKET, OwnTemporary

ROOT = Path(__file__).parents[2]
PROGRAM = """
import subprocess, sys, tempfile
from megarl.system.own_temporary import own_temporary

with own_temporary():
    tempfile.mkdtemp()
    below = [sys.executable, "-c", "import tempfile; print(tempfile.mkstemp()[1])"]
    print(subprocess.run(below, capture_output=True, text=True).stdout, flush=True)
    sys.stdin.read()
print("left", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def outer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a short name, as nothing else uses."""
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def start(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that uses a folder of its own inside `folder`, and the file that a process below it has left there."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def wait_until_empty(folder: Path) -> None:
    ends_at = time.monotonic() + 60
    while list(folder.iterdir()):
        assert time.monotonic() < ends_at, list(folder.rglob("*"))
        time.sleep(0.05)


def test_nothing_stays_of_a_process_that_ends_and_of_those_that_it_started(outer: Path) -> None:
    process, file = start(outer)
    assert file.is_file()
    assert file.parent.parent == outer
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert list(outer.iterdir()) == []


def test_nothing_stays_of_a_process_that_is_killed(outer: Path) -> None:
    process, file = start(outer)
    assert file.is_file()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until_empty(outer)


def test_folders_of_which_no_process_is_left_are_removed_by_the_next_one_and_no_others(outer: Path) -> None:
    forsaken = Path(tempfile.mkdtemp(prefix=own_temporary.PREFIX))
    (forsaken / "socket").touch()
    another = Path(tempfile.mkdtemp(prefix="somebody-elses-"))
    process, file = start(outer)
    assert not forsaken.exists()
    mine = OwnTemporary(is_seen_to=True)
    assert file.exists()
    assert another.exists()
    mine.remove()
    process.kill()
    process.communicate(timeout=60)


def test_what_a_program_starts_is_led_to_the_folder_and_the_program_is_not(outer: Path) -> None:
    mine = OwnTemporary()
    with mine.led_there():
        below = subprocess.run(["sh", "-c", "echo $TMPDIR"], capture_output=True, text=True, check=True).stdout.strip()
        assert Path(tempfile.mkdtemp()).parent == outer
    assert below == str(mine.folder)
    assert os.environ.get("TMPDIR") != below
    mine.remove()
    mine.remove()
    assert not mine.folder.exists()


@pytest.mark.parametrize("letters", [1, 100])
def test_sockets_of_ray_and_torch_have_paths_that_the_kernel_takes(
    outer: Path, monkeypatch: pytest.MonkeyPatch, letters: int
) -> None:
    folder = outer / ("x" * letters)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    mine = OwnTemporary(is_seen_to=True)
    assert len(f"{mine.ray.parent}{RAY_SOCKET}") <= LONGEST_SOCKET
    assert mine.folder.parent == folder
    (mine.folder / "here").touch()
    assert os.listdir(mine.environment["TMPDIR"]) == ["here"]
    sharing = "import torch; torch.multiprocessing.set_sharing_strategy('file_system'); torch.ones(2).share_memory_()"
    subprocess.run([sys.executable, "-c", sharing], env={**os.environ, **mine.environment}, check=True)
    mine.remove()
    assert not any(one.exists() for one in (mine.folder, mine.ray))


def test_what_torch_has_compiled_stays_where_it_was(outer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    mine = OwnTemporary(is_seen_to=True)
    assert mine.environment["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    mine.remove()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    mine = OwnTemporary(is_seen_to=True)
    assert "TORCHINDUCTOR_CACHE_DIR" not in mine.environment
    mine.remove()


def test_a_folder_into_which_something_is_written_meanwhile_is_removed_all_the_same(
    outer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, rmtree, late = OwnTemporary(is_seen_to=True), own_temporary.shutil.rmtree, [1, 2]

    def written_meanwhile(folder: Any, **options: Any) -> None:
        rmtree(folder, **options)
        if late:
            late.pop()
            os.makedirs(folder, exist_ok=True)

    monkeypatch.setattr(own_temporary.shutil, "rmtree", written_meanwhile)
    mine.remove()
    assert not mine.folder.exists()
