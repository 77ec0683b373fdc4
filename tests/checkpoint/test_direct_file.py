"""What is written past the page cache is what was meant, on every file system, and leaves the cache to others."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from pathlib import Path

import pytest
import xxhash

from megarl.checkpoint import direct_file
from megarl.checkpoint.direct_file import DirectFile
from megarl.checkpoint.dist_writer import write_shards
from megarl.errors import CheckpointError
from megarl.megatron.shards import Shards

BLOCK = direct_file._BLOCK


def write(path: Path, parts: list[bytes]) -> tuple[int, str]:
    with DirectFile(path) as file:
        for part in parts:
            file.write(part)
        return file.position, file.finish()


def cached_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        held = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), held) == 0
        del start
        return sum(page & 1 for page in held) * mmap.PAGESIZE


def takes_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("refuses", ["nothing", "to open", "to write"])
@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [4096], [BLOCK], [BLOCK - 1, 2, 4096], [7, 2 * BLOCK + 5, 0, 300], [BLOCK // 2] * 4]
)
def test_the_file_has_the_bytes_that_were_written(
    tmp_path: Path, sizes: list[int], refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_write = os.open, os.write

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    def write_(file: int, data: memoryview) -> int:
        if direct_file.fcntl.fcntl(file, direct_file.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(file, data[: max(1, len(data) // 2)])  # some write less than they are given

    if refuses == "to open":
        monkeypatch.setattr(os, "open", open_)
    if refuses == "to write":
        monkeypatch.setattr(os, "write", write_)
    draw = random.Random(0)
    parts = [draw.randbytes(size) for size in sizes]
    path = tmp_path / "file"
    path.write_bytes(b"of another time" * 1000)
    assert write(path, parts) == (sum(sizes), xxhash.xxh3_128_hexdigest(b"".join(parts)))
    monkeypatch.undo()
    assert path.read_bytes() == b"".join(parts)


def test_a_large_file_takes_no_room_in_the_page_cache(tmp_path: Path) -> None:
    if not takes_direct_writes(tmp_path):
        pytest.skip("this file system writes through the page cache alone")
    write(tmp_path / "file", [bytes(4 * BLOCK + 4096)])
    assert cached_bytes(tmp_path / "file") <= 4096


def test_a_disk_that_is_full_is_an_error_and_no_loop() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write(Path("/dev/full"), [b"x"])


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOMEM, MemoryError), (errno.EIO, CheckpointError)])
def test_memory_that_runs_out_is_not_taken_for_a_disk_that_fails(
    tmp_path: Path, number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def map_(file: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(direct_file.mmap, "mmap", map_)
    with pytest.raises(kind, match=f"__0_0.distcp' could not be written .{os.strerror(number)}"):
        write_shards(Shards(0, [], {}, None), tmp_path)
