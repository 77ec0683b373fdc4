"""Journals are bounded: what changes no model goes once it is answered, and passes without a step have a quota."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from megarl.options.serve import futures
from megarl.options.serve import journal as journals
from megarl.options.serve.journal import JournalEntry, RequestJournal
from tests.options.serve.served import Served, serving
from tests.options.serve.test_bad_input import Http, body
from tests.options.serve.test_journal import MODEL, journal_with
from tests.options.serve.test_restart import Again

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ROUNDS = ["pass", "forward", "step", "pass", "bad", "forward", "step", "pass", "bad_step", "forward", "pass", "no_loss"]
ROUNDS += ["forward", "step", "pass", "step"]
"""Kinds of a model's requests, by numbers from 1: passes that change it, and what does not."""
TOKENS, SLACK = 60, 2_000
"""Tokens of a pass whose body has more than 700 bytes, and bytes by which a journal grows before it is trimmed."""


def forward(model: str, seq: int, tokens: int) -> bytes:
    message = ForwardBackwardRequest.FromString(body(model, seq, tokens))
    message.forward_only = True
    return bytes(message.SerializeToString())


def send(http: Http, model: str, seq: int, kind: str) -> Any:
    """Send the request of that number and kind; its future."""
    tokens = 4 + seq % 3
    if kind.endswith("step"):
        return http.step(model, seq, learning_rate=0.05, **({"no_such_field": 1} if kind == "bad_step" else {}))
    if kind == "forward":
        return http.send(forward(model, seq, tokens))
    wrong = {"bad": {"advantages": np.full(tokens, np.nan, np.float32)}, "no_loss": {"loss": "custom"}}
    return http.send(body(model, seq, tokens, **wrong.get(kind, {})))


def sent(http: Http, model: str, numbers: range) -> list[Any]:
    return [http.answer(send(http, model, seq, ROUNDS[seq - 1])) for seq in numbers]


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "journal").rglob("requests-*"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answers of a server that nothing happens to, and that keeps no journal."""
    with serving(tmp_path_factory.mktemp("whole"), journal=False) as served:
        http = Http(served)
        answers = sent(http, http.model(seed=7), range(1, len(ROUNDS) + 1))
    failed = [kind for kind, answer in zip(ROUNDS, answers, strict=True) if isinstance(answer, dict) and "error" in answer]
    assert failed == ["bad", "step", "bad_step", "no_loss", "step"]
    return answers


@pytest.mark.parametrize(("snapshot_every_s", "last"), [(1e9, 2), (1e9, 6), (1e9, 8), (1e9, 10), (1e9, 15), (0.0, 15)])
def test_a_model_whose_journal_was_trimmed_comes_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Any], snapshot_every_s: float, last: int
) -> None:
    monkeypatch.setattr(RequestJournal, "has_grown", lambda *_: True)  # behind every request
    with serving(tmp_path, snapshot_every_s=snapshot_every_s, crash=True) as served:
        before = Http(served)
        model = before.model(seed=7)
        first = sent(before, model, range(1, last))
        unfetched = send(before, model, last, ROUNDS[last - 1])
        served.run(settled(served, f"{model}:{last}"))
    with serving(tmp_path, snapshot_every_s=snapshot_every_s) as served:
        http = Again(served, before)
        answers = [*first, http.answer(unfetched), *sent(http, model, range(last + 1, len(ROUNDS) + 1))]
        assert answers == expected
        again = http.answer(send(http, model, last, ROUNDS[last - 1]))
        assert again == expected[last - 1], "a late retry is answered as the request was"


async def settled(served: Served, identity: str) -> None:
    """Wait until a request is answered, and its model's journal trimmed behind it."""
    promise = served.service.promises.known(identity)
    assert promise is not None
    while promise.settled is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)


def test_a_client_that_only_calls_forward_leaves_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with gradients that wait, behind which there is no snapshot; the next server does none of it again."""
    monkeypatch.setattr(journals, "SLACK_BYTES", SLACK)
    monkeypatch.setattr(futures, "UNSURE_S", 0.0)
    with serving(tmp_path, crash=True) as served:
        before = Http(served)
        model = before.model(seed=7)
        before.answer(before.send(body(model, 1, TOKENS)))
        sizes = []
        for seq in range(2, 42):
            before.answer(before.send(forward(model, seq, TOKENS)))
            sizes.append(disk_bytes(tmp_path))
        sent_bytes = 40 * len(forward(model, 2, TOKENS))
        one = len(body(model, 1, TOKENS)) + 300
        assert sent_bytes > 28_000
        left = 2 * one  # how the model was made, its pass, and a forward that is not settled yet
        assert max(sizes) < 2 * left + SLACK + one + left, sizes  # while it is trimmed, the new file is beside the old one
        norm = before.answer(before.step(model, 42, learning_rate=0.05))
    with serving(tmp_path) as served:
        http = Again(served, before)
        assert http.answer(http.step(model, 43, learning_rate=0.05))["type"] == "optim_step"
        done = [call[0] for call in served.trainer.calls]
        assert (done[:2], done[-2:]) == (["create", "backward"], ["step", "step"])
        assert done.count("forward") <= max(sizes) // one
        twin = http.model(1, seed=7)
        http.answer(http.send(body(twin, 1, TOKENS)))
        assert http.answer(http.step(twin, 2, learning_rate=0.05)) == norm


def test_passes_without_a_step_have_a_bound_and_what_is_refused_leaves_nothing_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "SLACK_BYTES", SLACK)
    monkeypatch.setattr(futures, "UNSURE_S", 0.0)
    with serving(tmp_path, crash=True, max_step_bytes=10_000) as served:
        before = Http(served)
        model, twin = before.model(seed=7), before.model(1, seed=7)
        answers, sizes = [], []
        for seq in range(1, 41):
            answers.append(before.answer(before.send(body(model, seq, TOKENS))))
            sizes.append(disk_bytes(tmp_path))
        refused = [answer["error"] for answer in answers if isinstance(answer, dict)]
        assert [isinstance(answer, bytes) for answer in answers] == [True] * (40 - len(refused)) + [False] * len(refused)
        assert 30 < len(refused) < 40
        assert refused[-1].endswith(
            "than 10000 (serve.max_step_bytes), the most that a model may have; send optim_step earlier"
        )
        one = len(body(model, 1, TOKENS)) + 600
        assert max(sizes) < 2 * 10_000 + SLACK + 2 * one, sizes
        assert sizes[-1] < SLACK + 4 * one, "passes behind which there can be no step are forgotten"
    with serving(tmp_path, max_step_bytes=10_000) as served:
        http = Again(served, before)
        step = http.answer(http.step(model, 41, learning_rate=0.05))["error"]
        assert step == (
            f"request 40, forward_backward since the last optim_step, failed ({refused[-1]}), so there is no step, and "
            "gradients since the last one are dropped; send them again"
        )
        for name, seq in ((model, 42), (twin, 1)):
            http.answer(http.send(body(name, seq, TOKENS)))
        steps = [http.answer(http.step(name, seq, learning_rate=0.05)) for name, seq in ((model, 43), (twin, 2))]
        assert steps[0] == steps[1]


def kept_by_tens(last: int) -> Any:
    return lambda entry: entry if entry.seq % 10 == 0 or entry.seq > last else None


def test_what_is_appended_while_a_journal_is_trimmed_is_kept(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 30)

    def keep(entry: JournalEntry) -> JournalEntry | None:
        if entry.seq == 7:
            journal.append(MODEL, 31, "optim_step", b"meanwhile")
        return kept_by_tens(30)(entry)  # type: ignore[no-any-return]

    journal.trim(MODEL, keep, [JournalEntry(5, "answer", b"not fetched")])
    journal.append(MODEL, 32, "optim_step", b"then")
    journal.flush()
    entries = RequestJournal(tmp_path).replay(MODEL).entries
    assert [entry.seq for entry in entries] == [5, 10, 20, 30, 31, 32]
    assert [bytes(entry.body) for entry in entries[-2:]] == [b"meanwhile", b"then"]


def test_a_trim_that_fails_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    journal = journal_with(tmp_path, 30)

    def fail(entry: JournalEntry) -> JournalEntry | None:
        if entry.seq == 20:
            raise OSError(28, "No space left on device")
        return None

    with pytest.raises(OSError, match="No space left"):
        journal.trim(MODEL, fail)
    assert list(tmp_path.rglob("*.part")), "it had begun"
    journal.append(MODEL, 31, "optim_step", b"{}")
    journal.flush()
    assert [entry.seq for entry in RequestJournal(tmp_path).replay(MODEL).entries] == [*range(1, 32)]
    journal.trim(MODEL, kept_by_tens(31))
    assert [entry.seq for entry in journal.replay(MODEL).entries] == [10, 20, 30]


WRITER = """
import sys
from pathlib import Path
from megarl.options.serve.journal import RequestJournal

journal = RequestJournal(Path(sys.argv[1]))
if not journal.models():
    journal.begin("a:train:0", {})
seq = max([entry.seq for entry in journal.replay("a:train:0").entries], default=0)
while True:
    seq += 1
    journal.append("a:train:0", seq, "optim_step", bytes([seq % 256]) * 20_000)
    journal.flush()
    sys.stdout.write(f"{seq}\\n")
    sys.stdout.flush()
    if seq % 5 == 0:
        journal.trim("a:train:0", lambda entry: entry if entry.seq % 10 == 0 or entry.seq > seq - 3 else None)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_trims_has_what_was_kept_and_all_behind(tmp_path: Path) -> None:
    name = "a:train:0"
    for lines in (21, 35, 50):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(lines)]
        time.sleep(0.0003 * lines)
        writer.kill()
        said += writer.stdout.read().splitlines()
        writer.wait()
        flushed = max(int(line) for line in said)
        journal = RequestJournal(tmp_path)
        entries = journal.replay(name).entries
        assert {entry.seq for entry in entries} >= {*range(10, flushed + 1, 10), *range(flushed - 2, flushed + 1)}
        assert all(entry.body == bytes([entry.seq % 256]) * 20_000 for entry in entries)
        assert len(entries) <= flushed // 10 + 10
        journal.close()
