"""The second place of a run: whole or not there, nothing sent twice, damage seen; in a folder as in a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import CheckpointError, ConfigError, MirrorError
from megarl.options.mirror.mirror import INDEX, Mirror, open_store
from megarl.options.mirror.stores import HIDDEN_PREFIX, CopyStore, FolderStore
from megarl.runs.manifest import FORMAT, MANIFEST, FileRecord, check, render
from megarl.runs.run_checkpoint import CheckpointFolder, write_state
from tests.checkpoint.s3_server import BUCKET, S3Server, s3_server

FILES = {"policy/a.distcp": 3_000_000, "policy/b.distcp": 9_000_000, "policy/common.pt": 0, "state.json": 14}
"""Files of a checkpoint here and their bytes: one is sent in parts, one is empty."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A `run.mirror` with nothing in it."""
    if request.param == "folder":
        return str(tmp_path / "second")
    for name, value in request.getfixturevalue("server").environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


class Watched:
    """A store that notes what is put, and asks before."""

    def __init__(self, store: CopyStore) -> None:
        self._store, self.address = store, store.address
        self.put_names: list[str] = []
        self.before_put = lambda name: None

    def put(self, name: str, blocks: Iterable[bytes], record: FileRecord) -> None:
        self.before_put(name)
        self.put_names.append(name)
        self._store.put(name, blocks, record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def store(place: str) -> Watched:
    return Watched(open_store(place, "run"))


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run" / "checkpoints")


def make(checkpoints: CheckpointFolder, step: int, accuracy: float = 0.0, most: int = 10**9) -> Path:
    """A checkpoint of `FILES`, each of at most `most` bytes."""
    folder = checkpoints.begin(step)
    for name, size in FILES.items():
        size = min(size, most)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(os.urandom(size))
    write_state(folder, {"step": step})
    return checkpoints.commit(step, evaluation={"accuracy": accuracy})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def overwrite(store: CopyStore, name: str, content: bytes) -> None:
    store.put(name, [content], FileRecord(len(content), "not compared"))


def test_a_checkpoint_counts_when_its_manifest_is_there_which_comes_last(store: Watched, checkpoints: CheckpointFolder) -> None:
    mirror, counted = Mirror(store), list[list[int]]()
    store.before_put = lambda name: counted.append(mirror.steps())
    first, second = make(checkpoints, 1), make(checkpoints, 2)
    mirror.send(first)
    mirror.send(second)
    assert [Path(name).name for name in store.put_names].index(MANIFEST) == len(FILES)
    assert counted == [[]] * (len(FILES) + 1) + [[1]] * (len(FILES) + 1)
    assert mirror.steps() == [1, 2]
    elsewhere = CheckpointFolder(checkpoints.folder.parent / "elsewhere")
    fetched, damaged = mirror.bring_back(elsewhere, newer_than=1)
    assert not damaged
    assert fetched == elsewhere.folder / "step_000002" == elsewhere.resolve("auto")
    assert contents(fetched) == contents(second)
    assert mirror.bring_back(elsewhere, newer_than=2) == (None, [])


def test_a_copy_that_is_cut_off_anywhere_does_not_count_and_goes_on_where_it_was(
    store: Watched, checkpoints: CheckpointFolder
) -> None:
    """Ended between any two blocks, as by a stop or a kill."""
    first = make(checkpoints, 1)
    Mirror(store).send(first)
    left = 0

    def end() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("the process is gone")

    second, cuts = make(checkpoints, 2), 0
    for allowed in range(100):
        left, store.put_names = allowed, []
        try:
            Mirror(store, go_on=end).send(second)
        except RuntimeError:
            cuts += 1
            assert Mirror(store).steps() == [1]
        else:
            break
    assert Mirror(store).steps() == [1, 2]
    blocks = 1 + 3 + 1  # of 4 MiB in the files that are not empty
    assert cuts < blocks  # else each try would have sent everything again
    assert [Path(name).name for name in store.put_names][-1] == MANIFEST
    assert len(store.put_names) < len(FILES)
    fetched, _ = Mirror(store).bring_back(CheckpointFolder(checkpoints.folder.parent / "elsewhere"), newer_than=-1)
    assert fetched is not None
    assert contents(fetched) == contents(second)


def send_but_the_manifest(store: Watched, checkpoint: Path) -> None:
    """A copy that comes to nothing at its last file."""

    def end(name: str) -> None:
        if Path(name).name == MANIFEST:
            raise MirrorError("the line is down")

    store.before_put = end
    with pytest.raises(MirrorError):
        Mirror(store).send(checkpoint)
    store.before_put = lambda name: None


def test_a_half_copy_of_another_checkpoint_of_the_step_is_not_taken_for_this_one(
    store: Watched, checkpoints: CheckpointFolder
) -> None:
    """Same names, same sizes: the checksums tell."""

    send_but_the_manifest(store, make(checkpoints, 1))
    other = make(checkpoints, 1)
    Mirror(store).send(other)
    fetched, _ = Mirror(store).bring_back(CheckpointFolder(checkpoints.folder.parent / "elsewhere"), newer_than=-1)
    assert fetched is not None
    assert contents(fetched) == contents(other)


def test_what_a_copy_left_that_came_to_nothing_is_removed_by_the_next(store: Watched, checkpoints: CheckpointFolder) -> None:
    send_but_the_manifest(store, make(checkpoints, 1))
    assert len(store.sizes("checkpoints")) == len(FILES)
    second = make(checkpoints, 2)
    Mirror(store).send(second)
    assert {*store.sizes("")} == {f"checkpoints/step_000002/{name}" for name in (*FILES, MANIFEST)}


def test_another_checkpoint_of_a_step_takes_the_place_of_the_first_and_never_mixes_with_it(
    store: Watched, checkpoints: CheckpointFolder
) -> None:
    mirror = Mirror(store)
    mirror.send(make(checkpoints, 1))
    other = make(checkpoints, 1)
    sound: list[bool] = []

    def fetch(name: str) -> None:
        elsewhere = CheckpointFolder(checkpoints.folder.parent / "elsewhere")
        sound.append(not Mirror(store).bring_back(elsewhere, newer_than=-1)[1])

    store.before_put = fetch
    mirror.send(other)
    assert all(sound)
    elsewhere = CheckpointFolder(checkpoints.folder.parent / "in the end")
    fetched, _ = mirror.bring_back(elsewhere, newer_than=-1)
    assert fetched is not None
    assert contents(fetched) == contents(other)


def test_nothing_is_sent_again_that_is_there(store: Watched, checkpoints: CheckpointFolder) -> None:
    run, checkpoint = checkpoints.folder.parent, make(checkpoints, 1)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "placement.json").write_text("{}")
    (run / "media").mkdir()
    (run / "media" / "9b.png").write_bytes(b"a picture")
    mirror = Mirror(store)
    for sender in (mirror, mirror, Mirror(store)):
        sender.open_index()
        sender.send_records(run)
        sender.send(checkpoint)
    everything = {"metrics.jsonl", "placement.json", "media/9b.png", INDEX}
    everything |= {f"{store.unfinished('checkpoints/step_000001')}/{name}" for name in (*FILES, MANIFEST)}
    assert sorted(store.put_names) == sorted(everything)
    store.put_names = []
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"step": 3, "lo')
    mirror.send_records(run)
    assert store.put_names == [INDEX, "metrics.jsonl"]
    assert b"".join(store.blocks("metrics.jsonl")) == b'{"step": 1}\n{"step": 2}\n'


def test_a_damaged_file_of_the_run_is_not_sent_in_place_of_a_sound_one(store: Watched, checkpoints: CheckpointFolder) -> None:
    mirror = Mirror(store)
    first = make(checkpoints, 1)
    mirror.send(first)
    for name in ("policy/a.distcp", "policy/b.distcp"):
        damaged = make(checkpoints, 2)
        content = bytearray((damaged / name).read_bytes())
        content[-1] ^= 1
        (damaged / name).write_bytes(content)
        with pytest.raises(MirrorError, match=rf"'{damaged / name}' is damaged"):
            mirror.send(damaged)
        assert mirror.steps() == [1]
        assert f"{store.unfinished('checkpoints/step_000002')}/{name}" not in store.sizes("")


def test_every_damaged_copy_is_named_and_the_one_before_is_fetched(store: Watched, checkpoints: CheckpointFolder) -> None:
    mirror, first = Mirror(store), make(checkpoints, 1)
    mirror.send(first)
    for number, name in enumerate(["policy/a.distcp", "state.json", MANIFEST, "cut", "gone"]):
        second = make(checkpoints, 2, most=1000)
        mirror.send(second)
        file = {"cut": "policy/b.distcp", "gone": "policy/a.distcp"}.get(name, name)
        whole = bytearray((second / file).read_bytes())
        if name == "cut":
            overwrite(store, f"checkpoints/step_000002/{file}", whole[:-1])
        elif name == "gone":
            store.remove([f"checkpoints/step_000002/{file}"])
        else:
            whole[len(whole) // 2] ^= 1
            overwrite(store, f"checkpoints/step_000002/{file}", whole)
        elsewhere = CheckpointFolder(checkpoints.folder.parent / f"elsewhere-{number}")
        fetched, (said,) = mirror.bring_back(elsewhere, newer_than=-1)
        what = "missing" if name == "gone" else "damaged"
        assert said.startswith(f"'{store.address}/checkpoints/step_000002/{file}' is {what}")
        assert "\n" not in said
        assert fetched == elsewhere.folder / "step_000001"
        assert contents(elsewhere.folder) == {f"step_000001/{name}": content for name, content in contents(first).items()}
        check(fetched)


def test_the_mirror_keeps_what_the_run_would_keep_and_what_was_sent_last(store: Watched, checkpoints: CheckpointFolder) -> None:
    mirror = Mirror(store, keep=2, best="accuracy")
    kept = []
    for step, accuracy in ((10, 0.1), (20, 0.9), (30, 0.3), (40, 0.4), (50, 0.9), (60, 0.6), (70, 0.7), (5, 0.0)):
        mirror.send(make(checkpoints, step, accuracy, most=100))
        mirror = Mirror(store, keep=2, best="accuracy")  # what it knows is in the manifests
        mirror.remove_old(step)
        kept.append(mirror.steps())
    assert kept == [[10], [10, 20], [20, 30], [20, 30, 40], [40, 50], [50, 60], [50, 60, 70], [5, 50, 60, 70]]
    assert {Path(name).parts[1] for name in store.sizes("checkpoints")} == {f"step_{step:06d}" for step in kept[-1]}


@pytest.mark.parametrize(
    ("keep", "best", "back"),
    [(2, "accuracy", [10, 30, 40]), (3, None, [20, 30, 40]), (1, None, [40]), (0, "accuracy", [10, 40])],
)
def test_what_the_run_would_have_kept_comes_back_with_the_newest(
    keep: int, best: str | None, back: list[int], store: Watched, checkpoints: CheckpointFolder
) -> None:
    for step, accuracy in ((10, 0.9), (20, 0.2), (30, 0.3), (40, 0.4)):
        Mirror(store).send(make(checkpoints, step, accuracy, most=100))
    elsewhere = CheckpointFolder(checkpoints.folder.parent / "elsewhere")
    mirror = Mirror(store, keep, best)
    assert mirror.bring_back(elsewhere, newer_than=-1) == (elsewhere.folder / "step_000040", [])
    assert mirror.bring_back_earlier(elsewhere, 40) == []
    assert elsewhere.all() == [elsewhere.folder / f"step_{step:06d}" for step in back]
    for path in elsewhere.all():
        check(path)


def test_records_come_back_where_they_lack_and_damaged_ones_are_passed_over(
    store: Watched, checkpoints: CheckpointFolder
) -> None:
    run, elsewhere = checkpoints.folder.parent, checkpoints.folder.parent.with_name("elsewhere")
    records = {"metrics.jsonl": b'{"step": 1}\n', "samples.jsonl": b"{}\n", "summary.json": b"{}", "config.yaml": b"run: {}\n"}
    make(checkpoints, 1)
    (run / "media").mkdir()
    (run / "media" / "9b.png").write_bytes(b"a picture")
    (run / ".hidden").write_bytes(b"-")
    (run / "owner.json").write_bytes(b"{}")
    (run / "metrics.jsonl.1-2.part").write_bytes(b"-")
    for name, content in records.items():
        (run / name).write_bytes(content)
    Mirror(store).send_records(run)
    overwrite(store, "samples.jsonl", b"[]\n")
    overwrite(store, "not-a-record.json", b"{}")
    elsewhere.mkdir()
    (elsewhere / "config.yaml").write_bytes(b"newer")
    mirror = Mirror(store)
    mirror.open_index()
    (said,) = mirror.bring_back_records(elsewhere, but=("summary.json",))
    assert said == f"'{store.address}/samples.jsonl' is damaged: its checksum is not that of what was written"
    assert contents(elsewhere) == {
        "metrics.jsonl": records["metrics.jsonl"],
        "config.yaml": b"newer",
        "media/9b.png": b"a picture",
    }
    overwrite(store, INDEX, b"{}")
    with pytest.raises(CheckpointError, match=f"'{store.address}/{INDEX}' is damaged"):
        mirror.open_index()


@pytest.mark.parametrize("size", [10, 20_000_000])
def test_a_file_is_replaced_at_once_or_not_at_all(size: int, store: Watched) -> None:
    def blocks() -> Iterator[bytes]:
        yield bytes(size // 2)
        if is_cut:
            raise MirrorError("the line is down")
        yield bytes(size - size // 2)

    record = FileRecord(size, "not compared")
    store.put("metrics.jsonl", [b"old"], FileRecord(3, "not compared"))
    is_cut = True
    with pytest.raises(MirrorError, match="the line is down"):
        store.put("metrics.jsonl", blocks(), record)
    assert store.sizes("") == {"metrics.jsonl": 3}
    assert b"".join(store.blocks("metrics.jsonl")) == b"old"
    is_cut = False
    store.put("metrics.jsonl", blocks(), record)
    assert b"".join(store.blocks("metrics.jsonl")) == bytes(size)


def test_a_record_is_right_before_and_after_it_is_replaced(store: Watched, checkpoints: CheckpointFolder) -> None:
    """Between the index and the file a process may end."""
    run = checkpoints.folder.parent
    run.mkdir()
    (run / "metrics.jsonl").write_text("1\n")
    mirror = Mirror(store)
    mirror.send_records(run)
    (run / "metrics.jsonl").write_text("1\n2\n")

    def end(name: str) -> None:
        if name == "metrics.jsonl":
            raise MirrorError("the line is down")

    store.before_put = end
    with pytest.raises(MirrorError):
        mirror.send_records(run)
    after = Mirror(store)
    for number, content in enumerate(("1\n", "1\n2\n")):
        after.open_index()
        assert after.bring_back_records(run.with_name(f"back-{number}")) == []
        assert (run.with_name(f"back-{number}") / "metrics.jsonl").read_text() == content
        store.before_put = lambda name: None
        after.send_records(run)


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside"])
def test_a_manifest_from_elsewhere_names_no_file_outside(name: str, store: Watched, checkpoints: CheckpointFolder) -> None:
    text = render({"format": FORMAT, "made": {}, "files": {name: {"bytes": 1, "xxh3_128": "0"}}})
    overwrite(store, f"checkpoints/step_000001/{MANIFEST}", text.encode())
    fetched, (said,) = Mirror(store).bring_back(checkpoints, newer_than=-1)
    assert fetched is None
    assert "is not a file of a checkpoint" in said
    assert list(checkpoints.folder.iterdir()) == []


@pytest.mark.slow
def test_a_store_that_cannot_be_used_says_why_in_one_sentence(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(mirror: str, **environment: str) -> str:
        for name, value in {**server.environment, **environment}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MirrorError) as caught:
            Mirror(open_store(mirror, "run")).check_writable()
        said = str(caught.value)
        assert said.startswith(f"'{mirror}/run/.writable': ")
        assert "\n" not in said
        assert len(said) < 300
        return said

    here = f"s3://{BUCKET}/{tmp_path.name}"
    assert "NoSuchBucket: The specified bucket does not exist" in refused("s3://another/x")
    assert "InvalidAccessKeyId" in refused(here, AWS_ACCESS_KEY_ID="another")
    assert "SignatureDoesNotMatch" in refused(here, AWS_SECRET_ACCESS_KEY="another")
    assert "Connection refused (PUT http://127.0.0.1:1/" in refused(here, AWS_ENDPOINT_URL="http://127.0.0.1:1")
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"obstore is not installed; pip install 'megarl\[s3\]', or name a folder"):
        open_store(here, "run")


def test_a_folder_that_cannot_be_used_says_why_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MirrorError) as caught:
        Mirror(open_store(str(tmp_path / "file"), "run")).check_writable()
    assert str(caught.value) == f"'{tmp_path}/file/run': Not a directory"


def test_a_second_disk_that_is_full_keeps_what_it_has(tmp_path: Path, checkpoints: CheckpointFolder) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        mirror = Mirror(FolderStore(disk))
        mirror.send(make(checkpoints, 1))
        with pytest.raises(MirrorError, match=r"\.distcp': No space left on device$"):
            mirror.send(make(checkpoints, 2))
        assert mirror.steps() == [1]
        check(disk / "checkpoints" / "step_000001")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_links_lead_nowhere_from_a_run_or_into_a_mirror(tmp_path: Path) -> None:
    """A stranger who may write into either folder reads nothing of others by it, and has nothing of theirs written over."""
    run, mirror, private = tmp_path / "run", tmp_path / "second", tmp_path / "private"
    private.write_text("a secret")
    for folder in (run / "media", mirror / "media"):
        folder.mkdir(parents=True)
        (folder / "9b.png").symlink_to(private)
    (run / "metrics.jsonl").symlink_to(private)
    (run / "summary.json").write_text("{}")
    (mirror / f"{HIDDEN_PREFIX}summary.json").symlink_to(private)
    sender, elsewhere = Mirror(FolderStore(mirror)), tmp_path / "elsewhere"
    sender.send_records(run)
    assert private.read_text() == "a secret"
    elsewhere.mkdir()
    assert not sender.bring_back_records(elsewhere)
    assert contents(elsewhere) == {"summary.json": b"{}"}


def test_a_mirror_in_a_folder_can_be_used_as_the_run_itself(tmp_path: Path, checkpoints: CheckpointFolder) -> None:
    checkpoint = make(checkpoints, 7)
    Mirror(FolderStore(tmp_path / "second" / "run")).send(checkpoint)
    there = CheckpointFolder(tmp_path / "second" / "run" / "checkpoints").resolve("auto")
    assert there is not None
    assert contents(there) == contents(checkpoint)
    assert json.loads((there / "state.json").read_text()) == {"step": 7}
