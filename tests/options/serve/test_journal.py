"""The journal of training requests: what a crash at any byte leaves, and what a snapshot forgets."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import CheckpointError
from megarl.options.serve import journal as module
from megarl.options.serve.journal import JournalEntry, RequestJournal

MODEL = "4f1c-22:train:0"
FACTS = {"tenant": "anna", "base_model": "Qwen/Qwen3-0.6B", "rank": 32}


def entries(number: int) -> list[JournalEntry]:
    return [JournalEntry(seq, "forward_backward zstd", bytes([seq]) * (40 + 7 * seq)) for seq in range(1, number + 1)]


def journal_with(root: Path, number: int) -> RequestJournal:
    journal = RequestJournal(root)
    journal.begin(MODEL, FACTS)
    for entry in entries(number):
        journal.append(MODEL, entry.seq, entry.kind, entry.body)
    return journal


def log_of(root: Path) -> Path:
    return max(root.glob("*/requests-*.log"))


def write_state(text: str):
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(text)

    return write


def test_what_was_appended_is_replayed_in_order_after_a_restart(tmp_path: Path) -> None:
    journal_with(tmp_path, 5).flush()
    replay = RequestJournal(tmp_path).replay(MODEL)
    assert (replay.facts, replay.snapshot, replay.seq) == (FACTS, None, 0)
    assert list(replay.entries) == entries(5)
    assert RequestJournal(tmp_path).models() == [MODEL]


def test_a_crash_at_any_byte_keeps_all_whole_requests_and_no_part_of_one(tmp_path: Path) -> None:
    journal_with(tmp_path / "whole", 3).close()
    log = log_of(tmp_path / "whole")
    content = log.read_bytes()
    ends = [end for end in range(len(content) + 1) if len(module._read_content(content[:end])[0]) > 0]
    for end in range(len(content) + 1):
        kept, good = module._read_content(content[:end])
        assert kept == entries(3)[: len(kept)]
        assert good <= end
    assert ends
    for end in (len(content) - 1, len(content) - 60, 1, 0):
        log.write_bytes(content[:end])
        journal = RequestJournal(tmp_path / "whole")
        before = list(journal.replay(MODEL).entries)
        journal.append(MODEL, 9, "optim_step", b"behind")
        journal.close()
        assert list(RequestJournal(tmp_path / "whole").replay(MODEL).entries) == [
            *before,
            JournalEntry(9, "optim_step", b"behind"),
        ]


def test_zeros_behind_the_last_request_are_dropped(tmp_path: Path) -> None:
    journal_with(tmp_path, 2).close()
    with log_of(tmp_path).open("ab") as file:
        file.write(b"\0" * 5_000)
    assert list(RequestJournal(tmp_path).replay(MODEL).entries) == entries(2)


@pytest.mark.parametrize("place", [3, 30, 45, 60])
def test_a_changed_byte_in_a_request_that_was_durable_is_damage(tmp_path: Path, place: int) -> None:
    journal = journal_with(tmp_path, 1)
    journal.flush()
    journal.append(MODEL, 2, "optim_step", b"{}")
    journal.close()
    content = bytearray(log_of(tmp_path).read_bytes())
    content[place] ^= 1
    log_of(tmp_path).write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged at byte 0, in a request that was durable"):
        RequestJournal(tmp_path).replay(MODEL)


def test_a_bad_request_that_was_not_durable_is_dropped_with_all_behind_it(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 3)
    content = bytearray(log_of(tmp_path).read_bytes())  # nothing was flushed: the disk may have written the third alone
    second = content.find(entries(2)[1].body)
    content[second : second + 5] = bytes(5)
    journal.drop(MODEL)
    again = RequestJournal(tmp_path)
    again.begin(MODEL, FACTS)
    log_of(tmp_path).write_bytes(content)
    assert list(RequestJournal(tmp_path).replay(MODEL).entries) == entries(1)


def test_what_was_dropped_does_not_come_back_behind_a_new_request(tmp_path: Path) -> None:
    journal_with(tmp_path, 3)
    log = log_of(tmp_path)
    content = bytearray(log.read_bytes())
    second = content.find(entries(2)[1].body)
    content[second] ^= 1
    log.write_bytes(content)
    journal = RequestJournal(tmp_path)
    new = JournalEntry(2, entries(2)[1].kind, b"n" * len(entries(2)[1].body))  # as long as the bad one
    journal.append(MODEL, new.seq, new.kind, new.body)
    journal.close()
    assert list(RequestJournal(tmp_path).replay(MODEL).entries) == [*entries(1), new]


def test_a_snapshot_forgets_what_it_has_in_it_and_keeps_what_is_behind(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 5)
    carried = JournalEntry(3, "answer", b"not fetched")
    journal.snapshot(MODEL, 3, write_state("three"), [carried])
    journal.append(MODEL, 6, "optim_step", b"{}")
    journal.close()
    replay = RequestJournal(tmp_path).replay(MODEL)
    assert replay.seq == 3
    assert replay.snapshot is not None
    assert (replay.snapshot / "weights").read_text() == "three"
    assert list(replay.entries) == [carried, *entries(5)[3:], JournalEntry(6, "optim_step", b"{}")]


def test_a_second_snapshot_takes_the_place_of_the_first(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 4)
    journal.snapshot(MODEL, 2, write_state("two"))
    journal.snapshot(MODEL, 4, write_state("four"))
    journal.snapshot(MODEL, 4, write_state("again"))
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["facts.json", f"requests-{4:012d}.log", f"snapshot-{4:012d}"]
    replay = RequestJournal(tmp_path).replay(MODEL)
    assert replay.snapshot is not None
    assert (replay.snapshot / "weights").read_text() == "four"
    assert (replay.seq, list(replay.entries)) == (4, [])
    assert (folder / f"requests-{4:012d}.log").stat().st_size == 0


def test_a_snapshot_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 2)
    journal.snapshot(MODEL, 1, write_state("one"))

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text("half")
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        journal.snapshot(MODEL, 2, fail)
    replay = RequestJournal(tmp_path).replay(MODEL)
    assert (replay.seq, [entry.seq for entry in replay.entries]) == (1, [2])


def test_a_crash_between_a_snapshot_and_its_requests_goes_back_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_with(tmp_path, 3)
    journal.snapshot(MODEL, 1, write_state("one"))

    def die(path: Path, wanted: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_log", die)
        with pytest.raises(KeyboardInterrupt):
            journal.snapshot(MODEL, 3, write_state("three"))
    again = RequestJournal(tmp_path)
    replay = again.replay(MODEL)
    assert (replay.seq, [entry.seq for entry in replay.entries]) == (1, [2, 3])
    again.snapshot(MODEL, 3, write_state("three at last"))
    found = again.replay(MODEL).snapshot
    assert found is not None
    assert (found / "weights").read_text() == "three at last"


def test_requests_appended_during_a_snapshot_are_behind_it(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 1)

    def write(folder: Path) -> None:
        folder.mkdir()
        journal.append(MODEL, 2, "optim_step", b"meanwhile")

    journal.snapshot(MODEL, 1, write)
    journal.append(MODEL, 3, "optim_step", b"then")
    journal.flush()
    assert [entry.seq for entry in RequestJournal(tmp_path).replay(MODEL).entries] == [2, 3]


def test_threads_that_append_flush_and_take_snapshots_lose_nothing(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 0)
    other = "4f1c-22:train:1"
    journal.begin(other, FACTS)

    def work(model: str) -> None:
        for seq in range(1, 41):
            journal.append(model, seq, "optim_step", os.urandom(50))
            journal.flush()

    threads = [threading.Thread(target=work, args=[model]) for model in (MODEL, other)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        for model in (MODEL, other):
            done = [entry.seq for entry in journal.replay(model).entries]
            journal.snapshot(model, max(done, default=0), write_state("x"))
    for thread in threads:
        thread.join()
    for model in (MODEL, other):
        replay = RequestJournal(tmp_path).replay(model)
        assert [entry.seq for entry in replay.entries] == list(range(replay.seq + 1, 41))


def test_flush_syncs_once_for_many_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_with(tmp_path, 20)
    calls: list[int] = []
    monkeypatch.setattr(module.os, "fdatasync", calls.append)
    journal.flush()
    journal.flush()
    assert len(calls) == 1


def test_a_failed_write_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 2)
    log = journal._logs[MODEL]

    class FullDisk:
        def __init__(self, file) -> None:
            self.file, self.closed = file, False

        def write(self, content: bytes) -> int:
            self.file.write(content[:10])
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str):
            return getattr(self.file, name)

    whole, log.file = log.file, FullDisk(log.file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        journal.append(MODEL, 3, "optim_step", b"lost")
    log.file = whole
    journal.append(MODEL, 4, "optim_step", b"kept")
    assert [entry.seq for entry in RequestJournal(tmp_path).replay(MODEL).entries] == [1, 2, 4]


def test_a_model_is_begun_once_and_forgotten_whole(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 1)
    with pytest.raises(CheckpointError, match="has a journal already"):
        journal.begin(MODEL, FACTS)
    journal.drop(MODEL)
    assert journal.models() == []
    with pytest.raises(CheckpointError, match="has no journal"):
        journal.replay(MODEL)
    journal.begin(MODEL, FACTS)


def test_a_model_that_is_forgotten_takes_no_request_meanwhile_and_may_be_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = RequestJournal(tmp_path)
    journal.begin(MODEL, FACTS)
    remove = module.shutil.rmtree

    def later(folder: Path, **options: Any) -> None:
        with pytest.raises(CheckpointError, match="has no journal"):
            journal.append(MODEL, 1, "late", b"x")
        remove(folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", later)
        journal.drop(MODEL)
    journal.begin(MODEL, FACTS)
    journal.append(MODEL, 1, "new", b"y")
    journal.flush()
    assert [entry.kind for entry in RequestJournal(tmp_path).replay(MODEL).entries] == ["new"]
