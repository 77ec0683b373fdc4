"""Buffers of one process read by another, by the real NIXL: every byte, memory that is replaced, processes that are gone."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from itertools import pairwise
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.errors import EngineError
from megarl.options.transports import rdma, sender
from megarl.options.transports.rdma import ByteRange, Readable, RemoteReader
from megarl.options.transports.sender import parts_to_read
from megarl.platform.shared_memory import share
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.staging import SharedSlices, StagedSlices, Staging

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs NIXL: pip install 'megarl[rdma]'")

# stages a tensor for each size that it is given, and answers who reads it until it is told the next
STAGES = """
import pickle, select, sys
import torch
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.options.transports.sender import RegisteredStaging, parts_to_read
staging = RegisteredStaging(1, "rank-0")
while True:
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        staging._memory.progress()
    line = sys.stdin.readline()
    if not line:
        break
    seed, most, *rows = map(int, line.split())
    torch.manual_seed(seed)
    tensors = [torch.randint(0, 256, (count, 37), dtype=torch.uint8) for count in rows]
    pieces = [WeightSlice(SliceKey(str(n), n % 2, len(t), 0, 0, *t.shape), t) for n, t in enumerate(tensors)]
    staged = staging.stage(pieces)
    parts = [parts_to_read(specs, most) for specs in staged.specs(2)]
    print(pickle.dumps((tuple(staged.memory.readable(staged.buffer)), parts)).hex(), flush=True)
"""


class Owner:
    """Another process that stages what it is told to."""

    def __init__(self, environment: dict[str, str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", STAGES], env=os.environ | environment, text=True, **pipes)

    def stage(self, seed: int, most_bytes: int, rows: Sequence[int]) -> tuple[Readable, list[Any]]:
        """Where it is staged, and by rank the parts to read."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(seed, most_bytes, *rows, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if "NIXL" not in line:  # which logs there
                source, parts = pickle.loads(bytes.fromhex(line))
                return Readable(*source), parts
        raise AssertionError("the process has ended")


@pytest.fixture(params=[{}, {"UCX_TLS": "tcp"}], ids=["what UCX chooses", "TCP"])
def owner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    """A process with memory; over TCP it must help, over shared memory not."""
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    found = Owner(request.param)
    yield found
    found.process.kill()
    found.process.wait()


def expected(seed: int, rows: Sequence[int]) -> list[torch.Tensor]:
    """What the owner staged."""
    torch.manual_seed(seed)
    return [torch.randint(0, 256, (count, 37), dtype=torch.uint8) for count in rows]


def read(reader: RemoteReader, source: Readable, parts: Any, timeout_s: float = 60.0) -> dict[str, torch.Tensor]:
    """The pieces that a rank reads, by name."""
    ranges, found = [[ByteRange(*one) for one in some] for some, _ in parts], {}
    for window, (_, pieces) in zip(reader.read(source, ranges, timeout_s), parts, strict=True):
        for *place, _, start, stop in pieces:
            held = SliceKey(*place)
            assert held.tensor not in found
            found[held.tensor] = window[start:stop].clone().view(held.rows, held.cols)
    return found


@needs_nixl
def test_every_byte_is_read_in_parts_and_whole_and_when_the_memory_was_replaced(owner: Owner) -> None:
    reader = RemoteReader(torch.device("cpu"))
    # the second grows all buffers, the third fits into them, the fourth fills each window five times, and the last is one part
    for seed, most, rows in (
        (1, 2**12, [3, 50, 7, 200, 1, 90, 400]),
        (2, 2**16, [5000, 1, 9000, 4000, 2, 2, 8000]),
        (3, 2**14, [100, 30, 500]),
        (4, 2**12, [100] * 20),
        (5, 2**24, [5000, 1, 9000]),
    ):
        source, parts = owner.stage(seed, most, rows)
        wanted = expected(seed, rows)
        for rank in range(2):
            found = read(reader, source, parts[rank])
            assert sorted(found, key=int) == [str(n) for n in range(rank, len(rows), 2)]
            assert all(torch.equal(value, wanted[int(name)]) for name, value in found.items())
    assert len(parts[0]) == 1


@needs_nixl
def test_a_process_that_ended_is_named_at_once_and_another_is_read_afterwards(owner: Owner) -> None:
    reader = RemoteReader(torch.device("cpu"))
    source, parts = owner.stage(1, 2**14, [5000, 1])
    read(reader, source, parts[0])
    owner.process.kill()
    owner.process.wait()
    began = time.monotonic()
    for _ in range(2):  # when it was connected, and when it cannot be
        sentence = r"reading weights from rank-0-\S+ failed \(.+\): its process has ended"
        with pytest.raises(EngineError, match=sentence) as raised:
            read(reader, source, parts[0])
        assert "\n" not in str(raised.value)
    assert time.monotonic() - began < 30
    other = Owner({})
    try:
        source, parts = other.stage(2, 2**14, [600, 5])
        assert torch.equal(read(reader, source, parts[0])["0"], expected(2, [600, 5])[0])
    finally:
        other.process.kill()
        other.process.wait()


@needs_nixl
def test_a_process_that_does_not_answer_is_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # over shared memory and RDMA it need not answer
    owner, other, reader = Owner({}), Owner({}), RemoteReader(torch.device("cpu"))
    try:
        source, parts = owner.stage(1, 2**25, [500_000, 1])
        owner.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"from rank-0-\S+ took more than 2 s \(rollout.deadlines.update_s\)$"):
            read(reader, source, parts[0], timeout_s=2.0)
        assert 2 <= time.monotonic() - began < 10
        owner.process.send_signal(signal.SIGCONT)
        for process, seed in ((other, 2), (owner, 3)):  # nothing of what was given up gets into what is read next
            source, parts = process.stage(seed, 2**25, [500_000, 1])
            assert torch.equal(read(reader, source, parts[0])["0"], expected(seed, [500_000, 1])[0])
    finally:
        for one in (owner, other):
            one.process.kill()
            one.process.wait()


@needs_nixl
def test_whoever_asks_for_memory_that_is_no_longer_registered_is_refused(owner: Owner) -> None:
    reader = RemoteReader(torch.device("cpu"))
    old, parts = owner.stage(1, 2**14, [600, 1])
    new, _ = owner.stage(2, 2**14, [90_000, 1])
    read(reader, new, parts[0])
    with pytest.raises(EngineError, match=r"reading weights from rank-0-\S+ failed \(NIXL_ERR_NOT_FOUND\)"):
        read(reader, old._replace(metadata=new.metadata), parts[0])


@pytest.mark.parametrize("most_bytes", [1, 100, 2**10, 2**20])
@pytest.mark.parametrize("taken", [slice(None), slice(None, None, 2), slice(1, 9), slice(9, 8, -1)])
def test_a_rank_reads_each_byte_of_its_pieces_once_and_finds_it_where_it_is_told(most_bytes: int, taken: slice) -> None:
    torch.manual_seed(0)
    of_ranks = [0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0]
    tensors = [torch.randn(rows, 3) for rows in (1, 7, 30, 2, 5, 50, 3, 3, 1, 8, 20, 11)]
    pieces = [
        WeightSlice(SliceKey(str(n), rank, len(t), 0, 0, *t.shape), t)
        for n, (rank, t) in enumerate(zip(of_ranks, tensors, strict=True))
    ]
    staged: StagedSlices = Staging(1).stage(pieces)
    assert staged.buffer is not None
    staged = staged.only(staged.pieces[taken])
    for rank, specs in enumerate(staged.specs(2)):
        names = []
        for ranges, moved in parts_to_read(specs, most_bytes):
            size = max(one.at + one.stop - one.start for one in ranges)
            assert size <= most_bytes or len(moved) == 1
            window = torch.full((size,), 77, dtype=torch.uint8)
            assert all(before.stop <= after.start for before, after in pairwise(ranges))
            for start, stop, at in ranges:
                window[at : at + stop - start] = staged.buffer[start:stop]
            for name, *_, start, stop in moved:
                names.append(name)
                assert torch.equal(window[start:stop].view(torch.float32).view(-1, 3), tensors[int(name)])
        assert names == [p.held.tensor for p in staged.pieces if p.held.engine_rank == rank]
    if taken == slice(None) and most_bytes == 2**20:  # neighbours are one range
        assert [len(ranges) for specs in staged.specs(2) for ranges, _ in parts_to_read(specs, most_bytes)] == [4, 3]


def test_where_nixl_is_not_installed_the_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, *arguments: Any) -> Any:
        if name.startswith("nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return importlib.import_module(name, *arguments)

    monkeypatch.setattr(rdma, "import_module", absent)
    with pytest.raises(EngineError, match=r"needs NIXL, and it cannot be imported .*: pip install 'megarl\[rdma\]'"):
        rdma.load_nixl()
    with pytest.raises(EngineError, match="needs NIXL"):
        list(RemoteReader(torch.device("cpu")).read(Readable("a", b"", 0, "DRAM", 0), [[ByteRange(0, 1, 0)]], 1.0))


def test_weights_in_shared_memory_are_copied_into_registered_buffers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mock.Mock()
    monkeypatch.setattr(sender, "RegisteredMemory", lambda name: memory)
    weight = torch.randn(6, 5)
    share([weight])
    pieces = [WeightSlice(SliceKey.whole(name, weight)._replace(engine_rank=0), weight) for name in ("a", "b")]
    staging = sender.RegisteredStaging()
    staged = staging.stage(pieces)
    assert not isinstance(staged, SharedSlices)
    assert staging.bytes > 0
    assert all(torch.equal(copied.tensor, weight) for copied in staged.pieces)
    part = staged.only(staged.pieces[1:])
    assert part.memory is staged.memory is memory
    assert [piece.held.tensor for piece in part.pieces] == ["b"]
    reader: Future[None] = Future()
    staged.readers.append(reader)
    filled_again = Thread(target=lambda: [staging.stage(pieces) for _ in range(2)], daemon=True)
    filled_again.start()
    filled_again.join(0.2)
    assert filled_again.is_alive(), "the first buffer is read still"
    reader.set_result(None)
    filled_again.join(30)
    assert not filled_again.is_alive()
