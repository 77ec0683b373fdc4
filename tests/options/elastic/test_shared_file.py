"""Files that ranks write into shared memory: as the writer of checkpoints on disk makes them, and in place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.dist_writer import write_shards
from megarl.megatron.shards import ShardBox, Shards
from megarl.options.elastic import shared_file
from megarl.options.elastic.shared_file import SharedFile


def shards(seed: int, rows: int = 3, objects: int = 5) -> Shards:
    """Boxes of several dtypes, whose sizes leave what follows unaligned; an object and what all ranks share."""
    random = torch.Generator().manual_seed(seed)
    boxes = [
        ShardBox("weight", (8, 7), (1, 0), (rows, 7), torch.randn(rows * 7, generator=random)),
        ShardBox("weight", (8, 7), (6, 2), (1, 5), torch.randn(5, generator=random)),
        ShardBox("half", (9,), (0,), (9,), torch.randn(9, generator=random).bfloat16()),
        ShardBox("count", (), (), (), torch.randint(9, (1,), generator=random)),
    ]
    return Shards(0, boxes, {"rng": bytes([seed]) * objects}, {"step": seed}, {"weight": 2})


@pytest.mark.parametrize("second", [shards(2), shards(2, objects=9), shards(2, rows=5)], ids=["same", "objects", "boxes"])
def test_a_file_is_what_the_writer_of_checkpoints_writes_also_when_it_is_written_over(tmp_path: Path, second: Shards) -> None:
    file = SharedFile(tmp_path / "shared" / "__0_0.distcp")
    for number, content in enumerate((shards(1), second, shards(3))):
        expected = write_shards(content, tmp_path / f"{number}")
        part = file.write(content)
        assert (part.written.keys, part.written.objects) == (expected.keys, expected.objects)
        assert part.written.absent == expected.absent
        assert part.copied_bytes == sum(record.bytes for record in expected.files.values())
        for name, record in expected.files.items():
            assert part.written.files[name].bytes == record.bytes
            assert (tmp_path / "shared" / name).read_bytes()[: record.bytes] == (tmp_path / f"{number}" / name).read_bytes()


def test_a_file_is_written_in_place_and_frames_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, path = SharedFile(tmp_path / "__0_0.distcp"), tmp_path / "__0_0.distcp"
    file.write(shards(1))
    inode, mapped = path.stat().st_ino, file._bytes.data_ptr()
    put: list[int] = []
    monkeypatch.setattr(SharedFile, "_put", lambda file, content, start: put.append(len(content)))
    file.write(shards(2))
    assert (path.stat().st_ino, file._bytes.data_ptr()) == (inode, mapped)
    assert put == [5], "more than the object was written beside the values"


def test_a_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    file, path = SharedFile(tmp_path / "__0_0.distcp"), tmp_path / "__0_0.distcp"
    file.write(shards(1))
    path.unlink()
    size = file.write(shards(2)).written.files[path.name].bytes
    write_shards(shards(2), tmp_path / "expected")
    assert path.read_bytes()[:size] == (tmp_path / "expected" / path.name).read_bytes()


def test_memory_that_cannot_be_had_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_file.os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match=r"__0_0.distcp' has no room for \d+ bytes \(No space left on device\)"):
        SharedFile(tmp_path / "__0_0.distcp").write(shards(1))


def test_what_a_rank_wrote_outlives_its_process(tmp_path: Path) -> None:
    """Killed right behind the copy, it has nothing left to do that its state depends on."""
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.options.elastic.test_shared_file import shards;"
        "from megarl.options.elastic.shared_file import SharedFile;"
        "SharedFile(Path(sys.argv[1])).write(shards(4)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path, root = tmp_path / "__0_0.distcp", str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=root, env={**os.environ, "PYTHONPATH": root}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    write_shards(shards(4), tmp_path / "expected")
    content = (tmp_path / "expected" / path.name).read_bytes()
    assert path.read_bytes()[: len(content)] == content
