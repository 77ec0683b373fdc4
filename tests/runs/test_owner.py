"""A folder has one live owner: who gets it, who is refused, when an owner counts as dead, and that one who lost it notices."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.errors import ConfigError, OwnerError
from megarl.runs import owner
from megarl.runs.owner import Claim, FolderOwner, started, take, this_process
from megarl.runs.still_owned import check_owned

FORK = multiprocessing.get_context("fork")


def claim(path: Path) -> Claim:
    return take(path, lambda holder: f"it belongs to {holder}", say=lambda line: None)


def written(path: Path, one: FolderOwner) -> FolderOwner:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(one)))
    return one


def gone() -> FolderOwner:
    """The owner that a process was which has ended."""
    process = FORK.Process(target=lambda: None)
    process.start()
    pid, since = process.pid, started(process.pid or 0)
    process.join()
    return replace(this_process(), pid=pid or 0, started=since or 1)


def elsewhere(**different: Any) -> FolderOwner:
    return replace(this_process(), host="far", boot="other", pids="other", **different)


def compete(path: Path, number: int) -> list[str]:
    """What each of `number` processes comes to that try to take `path` at the same moment: `won`, or the sentence."""
    barrier, all_tried, answers = FORK.Barrier(number), FORK.Barrier(number), FORK.SimpleQueue()

    def try_it() -> None:
        barrier.wait(60)
        try:
            claim(path)
            answers.put(f"won by {os.getpid()}")
        except OwnerError as error:
            answers.put(str(error))
        all_tried.wait(60)  # alive until everybody has looked
        os._exit(0)  # and then dead without a word, as after kill -9

    processes = [FORK.Process(target=try_it) for _ in range(number)]
    for process in processes:
        process.start()
    said = [answers.get() for _ in processes]
    for process in processes:
        process.join(60)
    return said


@pytest.mark.parametrize("has_links", [True, False])
def test_of_processes_that_start_at_once_exactly_one_wins_and_the_others_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    path, winners = tmp_path / "run" / "owner.json", set()
    for _ in range(20 if has_links else 5):  # the first finds nobody, every further one an owner that is dead
        said = compete(path, 6)
        [winner] = [one.removeprefix("won by ") for one in said if one.startswith("won by ")]
        assert winner not in winners
        winners.add(winner)
        assert all(f"process {winner} of" in one for one in said if not one.startswith("won by "))
    assert [one.name for one in path.parent.iterdir()] == ["owner.json"]


def no_links(*_: Any) -> None:
    raise OSError(errno.EPERM, "no hard links here")


def test_who_looked_before_the_owner_was_replaced_does_not_replace_its_successor(tmp_path: Path) -> None:
    path, mine = tmp_path / "owner.json", tmp_path / ".mine"
    dead = written(path, gone())
    holder, _, passed = owner._holder(path)
    assert holder == dead
    winner = claim(path)
    me = written(mine, replace(this_process(), token="late"))
    assert not owner._succeed(path, holder, mine, me, passed)
    assert json.loads(path.read_text())["token"] == winner.owner.token
    winner.look()


def test_a_claim_of_who_came_too_late_is_not_taken_for_the_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, dead = tmp_path / "owner.json", gone()
    winner = written(path, replace(this_process(), token="winner"))
    written(owner._after(path, dead), replace(this_process(), token="late"))
    read, before = owner._read, [dead]  # read before the winner replaced it
    monkeypatch.setattr(owner, "_read", lambda file: before.pop() if before and file == path else read(file))
    assert owner._holder(path)[0] == winner


def test_a_successor_that_died_while_it_replaced_a_dead_owner_is_replaced_too(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    first = written(path, gone())
    written(owner._after(path, first), replace(gone(), token="second"))
    third = claim(path)
    assert json.loads(path.read_text())["token"] == third.owner.token
    assert [one.name for one in tmp_path.iterdir()] == ["owner.json"]


def test_a_process_is_told_from_a_later_one_of_its_id_and_from_one_before_the_machine_was_started_again() -> None:
    me = replace(this_process(), machine="installed once")
    assert me.fate(me) is True
    assert replace(me, started=me.started - 1).fate(me) is False
    assert gone().fate(me) is False
    assert replace(me, boot="an earlier one").fate(me) is False
    assert replace(me, boot="an earlier one", machine="another of that name").fate(me) is None
    assert replace(me, boot="an earlier one", machine="").fate(replace(me, machine="")) is None
    assert replace(me, pids="another container").fate(me) is None
    assert replace(me, host="far").fate(me) is None
    assert elsewhere(job="7", requeues=0).fate(replace(me, job="7", requeues=1)) is False
    assert elsewhere(job="7", requeues=1).fate(replace(me, job="7", requeues=1)) is None
    assert elsewhere(job="", requeues=0).fate(replace(me, job="", requeues=1)) is None


def test_the_start_of_a_process_is_what_ps_says(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    import psutil

    assert abs(boot + (started(os.getpid()) or 0) / ticks - psutil.Process().create_time()) < 1.5


class Clock:
    """Time that passes only when somebody sleeps, at which `during` is called."""

    CLOCK_BOOTTIME = 0

    def __init__(self, during: Callable[[], None]) -> None:
        self.now, self.during = 1000.0, during

    def monotonic(self) -> float:
        return self.now

    def clock_gettime(self, _: int) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(lambda: None)
    monkeypatch.setattr(owner, "time", made)
    return made


def test_an_owner_elsewhere_is_alive_while_its_beat_changes_whatever_its_clock_says(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "owner.json"
    written(path, elsewhere())
    os.utime(path, (0, 0))

    def beat() -> None:
        if clock.now >= 1050:
            os.utime(path, (1, 1))

    clock.during = beat
    with pytest.raises(OwnerError, match=r"of .* on far"):
        claim(path)
    assert clock.now == 1050


def test_an_owner_elsewhere_is_replaced_after_missed_beats_and_says_so_before(tmp_path: Path, clock: Clock) -> None:
    path, said = tmp_path / "owner.json", list[str]()
    written(path, elsewhere(pid=77))
    took = take(path, lambda holder: "alive", said.append)
    assert clock.now == 1000 + owner.MISSED_S
    assert json.loads(path.read_text())["token"] == took.owner.token
    assert len(said) == 1
    assert all(part in said[0] for part in ("process 77", "on far", "60 s"))


def test_one_that_waits_for_missed_beats_gives_way_to_one_that_was_faster(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "owner.json"
    written(path, elsewhere())

    def replace_it() -> None:
        other = tmp_path / "other"
        written(other, replace(this_process(), pid=1, started=started(1) or 0))
        os.replace(other, path)

    clock.during = replace_it
    with pytest.raises(OwnerError, match="process 1 of"):
        claim(path)


def test_a_damaged_file_belongs_to_somebody_unknown_until_beats_are_missed(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "owner.json"
    path.write_text("{")
    claim(path).look()
    assert clock.now >= 1000 + owner.MISSED_S


DAMAGED = {
    "deep": "[" * 100_000,
    "a_list": "[]",
    "no_token": '{"pid": 3}',
    "a_token_that_is_a_number": '{"token": 3}',
    "a_token_that_leads_elsewhere": '{"token": "../../made"}',
    "a_token_that_is_no_name": json.dumps({"token": "a" * 300}),
    "a_token_with_a_zero": '{"token": "a\\u0000"}',
    "half_a_character": '{"token": "\\ud800"}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_names_no_owner_is_as_a_damaged_one(name: str, tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "inner" / "owner.json"
    path.parent.mkdir()
    path.write_text(DAMAGED[name])
    claim(path).look()
    assert clock.now >= 1000 + owner.MISSED_S
    assert [*path.parent.iterdir()] == [path]
    assert [*tmp_path.iterdir()] == [path.parent]


def test_fields_of_an_owner_that_are_of_other_types_are_unknown(tmp_path: Path) -> None:
    given = asdict(this_process()) | {"pid": "../../x", "requeues": "many", "host": 3, "started": True, "more": [1]}
    read = owner.owner_in(json.dumps(given).encode())
    unknown = FolderOwner(token="")
    names = ("pid", "requeues", "host", "started")
    assert [getattr(read, name) for name in names] == [getattr(unknown, name) for name in names]
    assert (read.token, read.boot, read.user) == (given["token"], given["boot"], given["user"])


def test_half_a_file_is_read_again_when_it_is_whole(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "owner.json"
    path.write_text("{")
    text = json.dumps(asdict(this_process()))

    def write() -> None:
        path.write_text(text)

    clock.during = write
    with pytest.raises(OwnerError, match=f"process {os.getpid()} of"):
        claim(path)
    assert clock.now < 1001


def test_an_owner_beats_and_one_that_was_replaced_neither_beats_for_the_other_nor_removes_its_claim(
    tmp_path: Path, clock: Clock
) -> None:
    path, other = tmp_path / "owner.json", tmp_path / "other"
    old = claim(path)
    os.utime(path, (5, 5))
    clock.now += owner.BEAT_S
    old.beat()
    assert path.stat().st_mtime > 5
    new = written(other, elsewhere(token="new", pid=9))
    os.replace(other, path)
    os.utime(path, (5, 5))
    clock.now += owner.BEAT_S
    look, old.look = old.look, lambda: None  # type: ignore[method-assign] # a beat under way when the other came
    old.beat()
    old.look = look  # type: ignore[method-assign]
    assert path.stat().st_mtime == 5
    clock.now += owner.BEAT_S
    with pytest.raises(OwnerError, match=r"taken over by process 9 of .* on far"):
        old.beat()
    clock.now += owner.CHECK_S
    with pytest.raises(OwnerError):
        old.check()
    old.release()
    assert path.stat().st_mtime == 5
    assert json.loads(path.read_text())["token"] == new.token


def test_removing_the_file_takes_the_folder_from_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    old = claim(path)
    path.unlink()
    with pytest.raises(OwnerError, match="was removed"):
        old.look()
    claim(path).look()


def test_a_folder_that_was_lost_as_a_whole_and_made_again_is_claimed_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "owner.json"
    one = claim(path)
    shutil.rmtree(path.parent)
    one.look()
    assert not path.parent.exists()
    path.parent.mkdir()
    one.look()
    assert json.loads(path.read_text())["token"] == one.owner.token
    one.look()
    with pytest.raises(OwnerError):
        claim(path)


def test_leaving_removes_the_claim_and_folders_that_were_made_for_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "owner.json"
    claim(path).release()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    claim(path).release()
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    one = claim(path)
    (path.parent / "metrics.jsonl").touch()
    one.release()
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_forked_process_does_not_give_back_what_its_parent_owns(tmp_path: Path) -> None:
    path = tmp_path / "owner.json"
    one = claim(path)
    process = FORK.Process(target=one.release)
    process.start()
    process.join()
    one.look()


def config(folder: Path) -> Any:
    return SimpleNamespace(run_folder=str(folder / "mine"), run=SimpleNamespace(folder=str(folder)))


def test_a_second_run_in_a_folder_is_refused_in_a_sentence_that_names_the_first_and_says_how_to_end_it(tmp_path: Path) -> None:
    with owner.owned(config(tmp_path)):
        holder = json.loads((tmp_path / "mine" / "owner.json").read_text())
        with pytest.raises(OwnerError) as refused, owner.owned(config(tmp_path)):
            pass
        check_owned()
    said = str(refused.value)
    folder = tmp_path / "mine"
    for part in (
        f"process {os.getpid()} of {holder['user']} on {holder['host']}, since {holder['since']}",
        f"`kill {os.getpid()}`",
        f"removing {folder}/owner.json",
    ):
        assert part in said
    assert "\n" not in said
    with owner.owned(config(tmp_path)):
        pass
    assert not folder.exists()


def test_a_run_notices_at_a_phase_that_its_folder_was_taken_over(tmp_path: Path, clock: Clock) -> None:
    with owner.owned(config(tmp_path)):
        path = tmp_path / "mine" / "owner.json"
        (tmp_path / "other").write_text(json.dumps(asdict(elsewhere())))
        os.replace(tmp_path / "other", path)
        clock.now += owner.CHECK_S
        with pytest.raises(OwnerError, match="taken over"):
            check_owned()
    assert path.exists()
    check_owned()


def test_ranks_that_write_no_files_claim_nothing(tmp_path: Path) -> None:
    with owner.owned(config(tmp_path)), owner.owned(config(tmp_path), leads=False):
        pass


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_written_to_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigError) as refused:
        owner.take_run(config(tmp_path))
    assert str(refused.value) == (
        f"run.folder is '{tmp_path}', but nothing can be written to {tmp_path}/mine ({os.strerror(number)})"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_claim_does_not_depend_on_the_process_being_stopped(tmp_path: Path) -> None:
    path, ready = tmp_path / "owner.json", FORK.Event()

    def hold() -> None:
        claim(path)
        ready.set()
        signal.pause()

    process = FORK.Process(target=hold)
    process.start()
    ready.wait(60)
    os.kill(process.pid or 0, signal.SIGSTOP)
    with pytest.raises(OwnerError):
        claim(path)
    process.kill()
    process.join()
    claim(path).look()
