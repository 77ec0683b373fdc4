"""Checkpoints on disk: whole or not at all, never changed, ended by their lifetime, refused when damaged."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.options.serve import registry
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import ServedRun, SessionRecord
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import Quotas, Tenant
from megarl.options.serve.values import RequestError

ANNA, BEN = Tenant("anna"), Tenant("ben")
RUN = "0b6d7c5e-aa:train:0"
PATH = CheckpointPath(RUN, "weights", "000100")
MADE = {"base_model": "Qwen/Qwen3-0.6B", "rank": 32, "train_attn": True, "seq": 7}


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reopen(tmp_path: Path, clock: Clock) -> Callable[[], CheckpointStore]:
    return lambda: CheckpointStore(tmp_path / "serve", clock=clock, say=lambda text: None)


def save(store: CheckpointStore, path: CheckpointPath = PATH, tenant: Tenant = ANNA, size: int = 1_000, **more) -> None:
    with store.writing(tenant, path, MADE, **more) as folder:
        (folder / "adapters").mkdir()
        (folder / "adapters" / "weights.bin").write_bytes(b"w" * size)
        (folder / "step.json").write_bytes(b"{}")


@contextmanager
def refusal(sentence: str, status: int = 400) -> Iterator[None]:
    with pytest.raises(RequestError, match=sentence) as raised:
        yield
    assert raised.value.status == status
    assert "/serve/" not in str(raised.value), "folders of the server are nobody's business"


gone = "does not exist, or has expired"


def content(store: CheckpointStore, path: CheckpointPath = PATH, tenant: str = "anna") -> bytes:
    with store.reading(tenant, path) as folder:
        return (folder / "adapters" / "weights.bin").read_bytes()


def test_what_is_written_is_read_again_after_a_restart(reopen: Callable[[], CheckpointStore], clock: Clock) -> None:
    save(reopen(), ttl_seconds=7_200, user_metadata={"step": "100"})
    store = reopen()
    assert content(store) == b"w" * 1_000
    info = store.find("anna", PATH)
    assert (info.made, info.user_metadata, info.bytes) == (MADE, {"step": "100"}, 1_002)
    assert (info.created, info.expires, info.public) == (clock.now, clock.now + 7_200, False)
    assert store.files(PATH) == {"adapters/weights.bin": 1_000, "step.json": 2}
    assert store.used_bytes("anna") == 1_002


def test_a_save_that_fails_leaves_nothing(reopen: Callable[[], CheckpointStore], tmp_path: Path) -> None:
    store = reopen()
    with pytest.raises(RuntimeError, match="a rank died"), store.writing(ANNA, PATH, MADE) as folder:
        (folder / "half").write_bytes(b"x")
        raise RuntimeError("a rank died")
    with refusal(gone, 404):
        store.find("anna", PATH)
    assert [path for path in (tmp_path / "serve" / "checkpoints").rglob("*") if path.is_file()] == []
    save(store)
    assert store.used_bytes("anna") == 1_002


def test_what_a_crash_left_in_part_is_removed_at_start(reopen: Callable[[], CheckpointStore], tmp_path: Path) -> None:
    save(reopen())
    kind = tmp_path / "serve" / "checkpoints" / RUN.replace(":", "=") / "weights"
    (kind / ".part-0123" / "content" / "data").mkdir(parents=True)
    (kind / ".deleted-4567").mkdir()
    store = reopen()
    assert sorted(path.name for path in kind.iterdir()) == ["000100"]
    assert [info.path for info in store.listed("anna")] == [PATH]


def test_a_checkpoint_never_changes(reopen: Callable[[], CheckpointStore]) -> None:
    store = reopen()
    save(store)
    for tenant in (ANNA, BEN):
        with refusal("exists already, and checkpoints do not change"):
            save(store, tenant=tenant, size=5)
    with refusal("exists already"):
        save(store, tenant=BEN, size=5, overwrite=True)
    with store.writing(ANNA, CheckpointPath(RUN, "weights", "b"), MADE), refusal("exists already"):
        save(store, CheckpointPath(RUN, "weights", "b"))
    assert content(store) == b"w" * 1_000


def test_only_overwrite_replaces_and_a_crash_meanwhile_keeps_the_old(
    reopen: Callable[[], CheckpointStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopen()
    save(store)
    save(store, size=7, overwrite=True)
    assert content(store) == b"w" * 7
    assert store.used_bytes("anna") == 9
    rename, calls = Path.rename, []

    def die_at_the_second(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die_at_the_second)
        patch.setattr(shutil, "rmtree", lambda *given, **named: None)
        with pytest.raises(KeyboardInterrupt):
            save(store, size=8, overwrite=True)
    assert content(reopen()) == b"w" * 7
    store = reopen()
    with store.reading("anna", PATH), refusal("is being read, and cannot be overwritten now"):
        save(store, size=9, overwrite=True)


@pytest.mark.parametrize(
    ("ttl", "fits"), [(3_599, False), (3_600, True), (315_360_000, True), (315_360_001, False), (0, False), (-1, False)]
)
def test_lifetimes_are_an_hour_to_ten_years(reopen: Callable[[], CheckpointStore], ttl: int, *, fits: bool) -> None:
    store = reopen()
    if fits:
        save(store, ttl_seconds=ttl)
        store.set_ttl("anna", PATH, ttl)
        return
    with refusal(f"ttl_seconds is {ttl}; it must be a whole number from 3600"):
        save(store, ttl_seconds=ttl)
    save(store)
    with refusal("ttl_seconds"):
        store.set_ttl("anna", PATH, ttl)


@pytest.mark.parametrize("ttl", [True, 3_600.0, "3600", float("nan")])
def test_lifetimes_are_whole_numbers(reopen: Callable[[], CheckpointStore], ttl) -> None:
    with refusal("ttl_seconds is"):
        save(reopen(), ttl_seconds=ttl)


def test_a_checkpoint_ends_with_its_lifetime_and_the_sweep_gives_its_bytes_back(
    reopen: Callable[[], CheckpointStore], clock: Clock, tmp_path: Path
) -> None:
    store = reopen()
    save(store, ttl_seconds=3_600)
    other = CheckpointPath(RUN, "weights", "kept")
    save(store, other)
    clock.now += 3_599
    assert store.sweep() == []
    assert content(store) == b"w" * 1_000
    clock.now += 1
    with refusal(gone, 404):
        store.find("anna", PATH)
    assert [info.path for info in store.listed("anna")] == [other]
    assert store.sweep() == [PATH]
    assert store.used_bytes("anna") == 1_002
    assert len(list((tmp_path / "serve").rglob("weights.bin"))) == 1
    save(store, ttl_seconds=3_600)
    store.set_ttl("anna", PATH, None)
    clock.now += 10**9
    assert content(reopen()) == b"w" * 1_000


def test_an_expired_name_may_be_written_before_the_sweep(reopen: Callable[[], CheckpointStore], clock: Clock) -> None:
    store = reopen()
    save(store, ttl_seconds=3_600)
    clock.now += 3_600
    save(store, size=3)
    assert content(store) == b"www"


def test_what_is_being_read_stays_until_the_last_reader_is_done(reopen: Callable[[], CheckpointStore], clock: Clock) -> None:
    store = reopen()
    save(store, ttl_seconds=3_600)
    folder = store.pin("anna", PATH)
    with store.reading("anna", PATH):
        clock.now += 3_600
        assert store.sweep() == [PATH]
        assert (folder / "step.json").exists()
        with refusal("exists already"):
            save(store)
    assert (folder / "step.json").exists()
    assert store.used_bytes("anna") == 1_002
    store.unpin(PATH)
    assert not folder.exists()
    assert store.used_bytes("anna") == 0


def test_what_was_deleted_while_it_was_read_is_gone_after_a_restart(reopen: Callable[[], CheckpointStore]) -> None:
    store = reopen()
    save(store)
    folder = store.pin("anna", PATH)
    store.delete("anna", PATH)
    assert folder.exists()
    with refusal(gone, 404):
        reopen().find("anna", PATH)
    assert not folder.exists()


def test_a_published_checkpoint_is_read_by_all_and_changed_by_its_own_tenant(reopen: Callable[[], CheckpointStore]) -> None:
    store = reopen()
    save(store)
    never = CheckpointPath(RUN, "weights", "000101")
    for path in (PATH, never):
        with refusal(f"^{path} does not exist, or has expired$", 404):
            store.find("ben", path)
    store.publish("anna", PATH, public=True)
    store = reopen()
    assert content(store, tenant="ben") == b"w" * 1_000
    assert store.listed("ben") == []
    for change in (
        lambda: store.delete("ben", PATH),
        lambda: store.set_ttl("ben", PATH, 3_600),
        lambda: store.publish("ben", PATH, public=False),
    ):
        with refusal(gone, 404):
            change()
    with refusal("is published already"):
        store.publish("anna", PATH, public=True)
    store.publish("anna", PATH, public=False)
    with refusal(gone, 404):
        store.find("ben", PATH)


def test_a_copy_shares_bytes_and_outlives_its_source(reopen: Callable[[], CheckpointStore], tmp_path: Path) -> None:
    store = reopen()
    save(store, user_metadata={"a": "b"})
    target = CheckpointPath("other:train:0", "weights", "000100")
    with refusal(gone, 404):
        store.copy(BEN, PATH, target)
    store.publish("anna", PATH, public=True)
    store.copy(BEN, PATH, target, ttl_seconds=3_600)
    files = list((tmp_path / "serve").rglob("weights.bin"))
    assert len({os.stat(file).st_ino for file in files}) == 1
    store.delete("anna", PATH)
    assert content(store, target, "ben") == b"w" * 1_000
    assert store.find("ben", target).user_metadata == {"a": "b"}
    assert store.find("ben", target).made["copy_of"] == PATH.text
    with refusal(gone, 404):
        store.find("anna", target)


def test_quotas_of_bytes_are_kept(reopen: Callable[[], CheckpointStore]) -> None:
    store = reopen()
    small = Tenant("anna", Quotas(checkpoint_bytes=2_500))
    save(store, tenant=small)
    second = CheckpointPath(RUN, "weights", "second")
    save(store, second, tenant=small)
    with refusal("does not fit: tenant anna has 2004 bytes of checkpoints, and its quota is 2500"):
        save(store, CheckpointPath(RUN, "weights", "third"), tenant=small)
    save(store, second, tenant=small, size=1_490, overwrite=True)
    assert store.used_bytes("anna") == 2_494
    save(store, CheckpointPath("b:train:0", "weights", "x"), tenant=BEN, size=10_000)
    store.delete("anna", PATH)
    save(store, CheckpointPath(RUN, "weights", "third"), tenant=small)
    with refusal("does not fit"):
        store.copy(small, second, CheckpointPath(RUN, "weights", "copy"))


def test_two_saves_at_once_do_not_pass_the_quota_together(reopen: Callable[[], CheckpointStore]) -> None:
    store = reopen()
    small = Tenant("anna", Quotas(checkpoint_bytes=1_500))
    with refusal("does not fit"), store.writing(small, PATH, MADE) as folder:
        (folder / "first").write_bytes(b"f" * 1_000)
        save(store, CheckpointPath(RUN, "weights", "second"), tenant=small)
    assert [info.path.name for info in store.listed("anna")] == ["second"]


def test_the_server_has_a_bound_over_all_tenants(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, most_bytes=2_500)
    save(store)
    save(store, CheckpointPath("b:train:0", "weights", "x"), tenant=BEN)
    with refusal("this server keeps 2500 bytes of checkpoints"):
        save(store, CheckpointPath("b:train:0", "weights", "y"), tenant=BEN)


def damage_a_byte(folder: Path) -> None:
    file = folder / "content" / "data" / "adapters" / "weights.bin"
    file.write_bytes(b"w" * 500 + b"v" + b"w" * 499)


def cut_a_file(folder: Path) -> None:
    (folder / "content" / "data" / "adapters" / "weights.bin").write_bytes(b"w" * 999)


def remove_a_file(folder: Path) -> None:
    (folder / "content" / "data" / "step.json").unlink()


def add_a_file(folder: Path) -> None:
    (folder / "content" / "data" / "more.py").write_text("import os")


def link_a_file(folder: Path) -> None:
    (folder / "content" / "data" / "step.json").unlink()
    (folder / "content" / "data" / "step.json").symlink_to("/etc/passwd")


def change_the_manifest(folder: Path) -> None:
    file = folder / "content" / "manifest.json"
    file.write_text(file.read_text().replace('"anna"', '"benn"'))


def remove_the_manifest(folder: Path) -> None:
    (folder / "content" / "manifest.json").unlink()


def damage_the_terms(folder: Path) -> None:
    (folder / "terms.json").write_text('{"public": tr')


DAMAGES = {
    damage_a_byte: "'data/adapters/weights.bin' is damaged: its checksum",
    cut_a_file: "'data/adapters/weights.bin' has 999 bytes, but 1000 were written",
    remove_a_file: "'data/step.json' is missing",
    add_a_file: "'data/more.py' is not in the checkpoint's manifest.json",
    link_a_file: "'data/step.json' is a link or a device",
    change_the_manifest: "its checksum is not its own",
    remove_the_manifest: "manifest.json",
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("damage", [*DAMAGES, damage_the_terms], ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_in_one_sentence_and_can_be_deleted(
    reopen: Callable[[], CheckpointStore], tmp_path: Path, damage: Callable[[Path], None], *, restart: bool
) -> None:
    store = reopen()
    store.registry.runs.add(ServedRun(RUN, "anna", 0.0, "s", "Qwen/Qwen3-0.6B", rank=32))
    save(store)
    damage(tmp_path / "serve" / "checkpoints" / RUN.replace(":", "=") / "weights" / "000100")
    store = reopen() if restart else store
    if damage is damage_the_terms and not restart:
        return  # they are read at start only
    sentence = DAMAGES.get(damage, "")
    with refusal(f"^{PATH} is damaged: .*{sentence}"):
        content(store)
    with refusal(gone, 404):
        content(store, tenant="ben")
    store.delete("anna", PATH)
    save(store)
    assert content(store) == b"w" * 1_000


def test_links_are_not_taken_into_a_checkpoint(reopen: Callable[[], CheckpointStore]) -> None:
    with pytest.raises(Exception, match="is a link or a device"), reopen().writing(ANNA, PATH, MADE) as folder:
        (folder / "passwd").symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    "text",
    [
        "tinker://../weights/x", "tinker://a/weights/..", "tinker://a/weights/.hidden", "tinker://a/weights/a/b",
        "tinker:///weights/x", "tinker://a/other/x", "tinker://a/weights/x\0", "tinker://a/weights/x\n", "tinker://a/weights/ä",
        "tinker://a=b/weights/x", "tinker://a/weights/%2e%2e", "tinker://a\\b/weights/x", "/etc/passwd", "file://a/weights/x",
        "tinker://a/weights/" + "x" * 129, "tinker://" + "a" * 161 + "/weights/x", "tinker://a/weights/-rf", "",
        "tinker://a/weights/x y", "tinker://a/weights/",
    ],
)  # fmt: skip
def test_paths_that_could_lead_elsewhere_are_refused(text: str) -> None:
    with pytest.raises(RequestError) as raised:
        CheckpointPath.parse(text)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("name", ["final", "000100", "step_100", "rolling-000010", "checkpoint.v2", "kl=0.1", "e1+e2"])
def test_names_as_recipes_choose_them_are_taken(name: str) -> None:
    path = CheckpointPath.parse(f"tinker://{RUN}/sampler_weights/{name}")
    assert (path.run, path.kind, path.name) == (RUN, "sampler_weights", name)
    assert path.text == f"tinker://{RUN}/sampler_weights/{name}"


def test_metadata_have_an_end(reopen: Callable[[], CheckpointStore]) -> None:
    with refusal("user_metadata have .* bytes as JSON; they must have at most 16384"):
        save(reopen(), user_metadata={"a": "b" * 20_000})


def test_records_survive_a_restart_and_a_broken_file_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    store = CheckpointStore(tmp_path)
    store.registry.runs.add(ServedRun(RUN, "anna", 5.0, "s", "base", rank=8, user_metadata={"a": 1}))
    store.registry.runs.add(ServedRun("z:train:0", "anna", 6.0, "s", "base"))
    store.registry.runs.touch("anna", RUN, 9.0)
    with pytest.raises(RequestError, match="exists already"):
        store.registry.runs.add(ServedRun(RUN, "ben", 5.0, "s", "base"))
    store.sweep()
    (tmp_path / "training_runs" / "z=train=0.json").write_text('{"id": "z:tr')
    (tmp_path / "training_runs" / "y.json").write_text(json.dumps({"id": "../../y", "tenant": "anna"}))
    runs = CheckpointStore(tmp_path, say=said.append).registry.runs
    assert runs.get("anna", RUN) == ServedRun(RUN, "anna", 5.0, "s", "base", rank=8, user_metadata={"a": 1}, last_seen=9.0)
    assert [run.id for run in runs.of("anna")] == [RUN]
    assert len(said) == 2
    with pytest.raises(RequestError, match="training run z:train:0 does not exist"):
        runs.get("anna", "z:train:0")
    with pytest.raises(RequestError, match="does not exist"):
        runs.get("ben", RUN)


@pytest.mark.parametrize("then", ["changed", "removed"])
def test_a_record_that_is_changed_while_an_older_one_of_it_is_written_is_so_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    sessions = CheckpointStore(tmp_path).registry.sessions
    sessions.add(SessionRecord("s", "anna", 5.0))
    sessions.touch("anna", "s", 6.0)
    writing, may_write, write = threading.Event(), threading.Event(), registry.write_text_atomically

    def late(path: Path, text: str) -> None:
        if not writing.is_set():
            writing.set()
            assert may_write.wait(30)
        write(path, text)

    monkeypatch.setattr(registry, "write_text_atomically", late)
    finished: dict[str, Any] = {"status": {"type": "client_finished"}}
    with ThreadPoolExecutor(2) as threads:
        older = threads.submit(sessions.write_touched)
        assert writing.wait(30)
        call = partial(sessions.change, "anna", "s", **finished) if then == "changed" else partial(sessions.remove, "s")
        newer = threads.submit(call)
        wait([newer], 0.2)  # where nothing holds it up, it is written before the older one
        may_write.set()
        older.result(30)
        newer.result(30)
    kept = CheckpointStore(tmp_path).registry.sessions.all()
    assert [record.status for record in kept] == ([finished["status"]] if then == "changed" else [])
