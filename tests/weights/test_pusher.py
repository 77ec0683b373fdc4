"""One rank's pushes: every engine that lives gets every byte, whatever becomes of the others, through two buffers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray
import torch
from torch import Tensor

from megarl.errors import EngineError
from megarl.platform.shared_memory import share
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.weights.checksums import RunningDigest, digest
from megarl.weights.delta import base_for
from megarl.weights.merged_pushes import merge
from megarl.weights.pusher import Pushed, Pusher
from megarl.weights.rank_plan import SendBatch, SliceKey, WeightSlice
from megarl.weights.staging import StagedSlices, Staging, ZeroCopy
from megarl.workers.senders import model_of
from tests.rollout.tiny import TINY, load, save_tiny, weights_of
from tests.weights.staged_tensors import StagedTensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), TINY)


SMALL = 2**14
"""So that the tiny model is many loads."""


class Direct(StagedTensors):
    """Sends to an embedded engine in this process; `dies_at` is the bucket in which the engine is lost."""

    is_checked = False  # the engine takes the checksums

    def __init__(self, engine: EmbeddedEngine, *, dies_at: int | None = None, slow_s: float = 0.0) -> None:
        self.engine, self.dies_at, self.slow_s = engine, dies_at, slow_s
        self.tried, self.is_closed = 0, False

    def deliver(self, staged: StagedSlices) -> None:
        """Half of the last bucket's time passes before the engine reads, so that a buffer filled too early is seen."""
        time.sleep(self.slow_s)
        self.tried += 1
        if self.dies_at is not None and self.tried > self.dies_at:
            raise EngineError("engine 1 did not answer: connection reset by peer")
        asyncio.run(self.engine.apply_update(staged.tensors()))

    def close(self) -> None:
        """An engine that is gone does not answer this, either."""
        self.is_closed = True
        raise EngineError("engine did not answer")


def exported(weights: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights as the export gives them: each in memory that is used again for the next."""
    scratch = torch.empty(max(weight.numel() for _, weight in weights))
    for name, weight in weights:
        yield name, scratch[: weight.numel()].view(weight.shape).copy_(weight).clone()


def test_an_engine_that_dies_in_the_middle_does_not_touch_the_others(folder: Path) -> None:
    engines = [EmbeddedEngine(folder, initial_version=0) for _ in range(3)]
    pusher = Pusher(load_bytes=SMALL)
    for number, engine in enumerate(engines):
        sender = Direct(engine, dies_at=3 if number == 1 else None, slow_s=0.01 * number)
        pusher.connect(number, lambda sender=sender: sender)
    new = load(folder, seed=1)

    async def begin() -> None:
        for engine in engines:
            await engine.begin_update(1)

    asyncio.run(begin())
    pushed = pusher.push(exported(weights_of(new)))
    assert pushed[1] == Pushed(error="engine 1 did not answer: connection reset by peer")
    assert pushed[0] == pushed[2] == Pushed({}, nbytes=sum(weight.nbytes for _, weight in weights_of(new)))
    assert pusher.senders[1].tried == 4  # type: ignore[attr-defined]  # what comes after a failure is not sent to it

    async def end() -> None:
        for number in (0, 2):
            await engines[number].end_update(1)
            assert engines[number].weight_version == 1
            for name, weight in weights_of(new):
                assert torch.equal(engines[number]._held[name], weight), name
        # some of the new weights are in it, and it knows that it has no version: it cannot answer with the mixture
        assert engines[1].weight_version is None
        with pytest.raises(EngineError, match="nobody sent"):
            await engines[1].end_update(1)
        assert engines[1].weight_version is None

    asyncio.run(end())
    dead = pusher.senders[1]
    again = Direct(EmbeddedEngine(folder))
    asyncio.run(again.engine.begin_update(1))
    pusher.connect(1, lambda: again)  # closing the old connection fails, which is nobody's concern
    assert dead.is_closed  # type: ignore[attr-defined]
    assert pusher.push(exported(weights_of(new)), {1: None})[1].error is None
    asyncio.run(again.engine.end_update(1))
    assert again.engine.weight_version == 1


def test_an_engine_that_cannot_be_reached_is_an_error_of_the_push_and_the_export_still_runs_to_its_end(folder: Path) -> None:
    def refuse() -> Any:
        raise EngineError("http://127.0.0.1:1 does not answer")

    pusher, left = Pusher(load_bytes=SMALL), exported(weights_of(load(folder)))
    pusher.connect(0, refuse)
    assert pusher.push(left) == {0: Pushed(error="http://127.0.0.1:1 does not answer")}
    assert next(left, None) is None  # the export is collective: the other ranks of the stage wait in it


class Counting(Direct):
    """Remembers what it sent."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine)
        self.names: list[str] = []

    def deliver(self, staged: StagedSlices) -> None:
        """Write down the names."""
        self.names += [piece.held.tensor for piece in staged.pieces]
        super().deliver(staged)


async def update(
    engines: Sequence[EmbeddedEngine], bases: Sequence[int | None], version: int, pusher: Pusher, model: Any
) -> None:
    """A whole update of these engines; each builds on its base."""
    for engine, base in zip(engines, bases, strict=True):
        await engine.begin_update(version, base)
    pushed = await asyncio.to_thread(pusher.push, exported(weights_of(model)), dict(enumerate(bases)), version)
    for engine, one in zip(engines, pushed.values(), strict=True):
        assert one.error is None
        await engine.end_update(version, one.checksums)


def test_an_engine_that_is_lost_before_it_was_asked_for_its_model_is_an_error_of_the_push_too() -> None:
    with mock.patch.object(ray, "get", side_effect=ray.exceptions.ActorUnavailableError("gone", None)):
        assert model_of(mock.Mock()) is None


def test_a_delta_update_sends_what_changed_and_leaves_the_same_bytes_as_a_full_one(folder: Path) -> None:
    """Engine 0 is given changes, engine 1 everything each time; engine 0 is restarted once in between."""

    async def scenario() -> None:
        model = load(folder)
        senders = [Counting(EmbeddedEngine(folder)) for _ in range(2)]
        pusher = Pusher(load_bytes=SMALL)
        for number, sender in enumerate(senders):
            pusher.connect(number, lambda sender=sender: sender)
        names = [name for name, _ in weights_of(model)]
        changes: list[list[str]] = [[], ["model.norm.weight"], [], names[2:5], names[:1], [names[3]]]
        for version, changed in enumerate(changes, start=1):
            with torch.no_grad():
                for name in changed:
                    model.get_parameter(name).view(-1)[-1] += 1e-3
            if version == 5:  # a new engine: it has no version that an update could build on
                senders[0] = Counting(EmbeddedEngine(folder))
                pusher.connect(0, lambda: senders[0])
            engines = [sender.engine for sender in senders]
            base = base_for(engines[0].weight_version, version, every=100)
            await update(engines, [base, None], version, pusher, model)
            assert sorted(senders[0].names) == sorted(names if version in (1, 5) else changed)
            assert sorted(senders[1].names) == sorted(names)
            for sender in senders:
                sender.names.clear()
            for name, weight in weights_of(model):
                assert torch.equal(engines[0]._held[name], weight), (version, name)
                assert torch.equal(engines[1]._held[name], weight), (version, name)

    asyncio.run(scenario())


def test_changes_are_told_from_what_was_sent_last_and_nothing_else(folder: Path) -> None:
    """An engine that missed an update, so that its base is an older version than the sender's, is given everything."""

    async def scenario() -> None:
        model, sender = load(folder), Counting(EmbeddedEngine(folder))
        pusher = Pusher(load_bytes=SMALL)
        pusher.connect(0, lambda: sender)
        await update([sender.engine], [None], 1, pusher, model)
        with torch.no_grad():
            model.model.norm.weight += 1
        pusher.push(exported(weights_of(model)), {}, 2)  # nobody was connected, and nothing was remembered
        sender.names.clear()
        await update([sender.engine], [1], 3, pusher, model)
        assert sender.names == ["model.norm.weight"]
        other = Counting(EmbeddedEngine(folder))
        pusher.connect(1, lambda: other)
        await other.engine.begin_update(4)
        pusher.push(exported(weights_of(model)), {1: None}, 4)  # engine 0 was left out and has version 3 still
        sender.names.clear()
        await update([sender.engine], [3], 5, pusher, model)
        assert len(sender.names) == len(weights_of(model))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("confirmed", "version", "every", "base"),
    [(4, 5, 0, None), (4, 5, 10, 4), (9, 10, 10, None), (None, 5, 10, None), (3, 5, 1, None)],
)
def test_a_full_update_is_due_at_every_nth_version_and_to_engines_without_one(
    confirmed: int | None, version: int, every: int, base: int | None
) -> None:
    assert base_for(confirmed, version, every) == base


def test_at_most_two_buckets_are_staged_and_none_is_overwritten_before_the_engine_has_read_it() -> None:
    """A reader that compares what it finds with what was staged, long after the next buckets could have come."""
    weights = [(f"w{number}", torch.full((1000,), float(number))) for number in range(12)]
    staging, wrong = Staging(), []

    def read(staged: StagedSlices, expected: float, may_read: threading.Event) -> None:
        may_read.wait(0.02)
        wrong.extend(name for name, weight in staged.tensors() if not bool((weight == expected).all()))

    with ThreadPoolExecutor(2) as pool:
        for number, (name, weight) in enumerate(weights):
            staged = staging.stage([WeightSlice(SliceKey.whole(name, weight), weight)])
            staged.readers += [pool.submit(read, staged, float(number), threading.Event()) for _ in range(2)]
    assert wrong == []
    assert staging.bytes == 2 * 4000


HASHED = {
    "whole": torch.randn(300, 700), "several blocks to a row": torch.randn(3, 2**17), "vector": torch.randn(70_001),
    "columns": torch.randn(300, 700)[:, 100:390], "bfloat16": torch.randn(513, 257).bfloat16(), "empty": torch.zeros(0, 5),
    "bytes": torch.randn(40, 33).to(torch.float8_e4m3fn), "scales": torch.arange(7, dtype=torch.int64),
}  # fmt: skip


@pytest.mark.parametrize("name", HASHED)
def test_the_checksum_that_is_taken_while_copying_is_that_of_the_whole(name: str) -> None:
    pieces = [WeightSlice(SliceKey.whole(name, HASHED[name]), HASHED[name])]
    [copy] = (staged := Staging().stage(pieces)).pieces
    with mock.patch("megarl.weights.staging.digests", side_effect=AssertionError("it was taken while copying")):
        found = staged.digest(copy)
    assert found == digest(HASHED[name]) == digest(copy.tensor)


@pytest.mark.parametrize(("version", "verify", "is_checked", "times"), [
    (None, True, True, 2), (None, False, True, 0), (None, True, False, 0), (1, False, False, 2), (1, True, True, 2),
])  # fmt: skip
def test_every_piece_is_hashed_once_if_at_all(version: int | None, verify: bool, is_checked: bool, times: int) -> None:
    pusher, sender = Pusher(), Taking()
    sender.is_checked = is_checked
    pusher.connect(0, lambda: sender)
    load = load_of({name: torch.ones(50, 4) for name in "ab"}, {0})
    with mock.patch("megarl.weights.copying.RunningDigest", side_effect=RunningDigest) as running:
        pusher.push_loads(iter([load]), {0: None}, version, verify=verify)
    assert running.call_count == times
    assert sender.names == ["a", "b"]


def load_of(weights: dict[str, Tensor], engines: set[int]) -> SendBatch:
    """Weights for the only rank of some engines."""
    pieces = [WeightSlice(SliceKey.whole(name, weight)._replace(engine_rank=0), weight) for name, weight in weights.items()]
    return SendBatch(pieces, frozenset(engines))


class Taking(Counting):
    """Takes checksums of what it sends, and keeps it instead of handing it to an engine."""

    is_checked = True

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.values: dict[str, Tensor] = {}

    def deliver(self, staged: StagedSlices) -> None:
        """Keep a copy."""
        self.names += [piece.held.tensor for piece in staged.pieces]
        self.values |= {name: tensor.clone() for name, tensor in staged.tensors()}


def test_a_load_goes_to_its_own_engines_and_their_checksums_are_of_all_that_they_must_hold() -> None:
    """Engine 0 has version 1 and is sent changes; of what has not changed it is told the checksum all the same."""
    pusher, senders = Pusher(load_bytes=SMALL), [Taking(), Taking()]
    for number, sender in enumerate(senders):
        pusher.connect(number, lambda sender=sender: sender)
    first, second = ({f"{name}{i}": torch.full((100,), float(i)) for i in range(3)} for name in "ab")
    loads = [load_of(first, {0}), load_of(second, {0, 1})]
    pushed = pusher.push_loads(iter(loads), {0: None, 1: None}, version=1)
    assert [set(sender.values) for sender in senders] == [{*first, *second}, {*second}]
    first["a1"] = first["a1"] + 1
    for sender in senders:
        sender.names.clear()
    loads = [load_of(first, {0}), load_of(second, {0, 1})]
    again = pusher.push_loads(iter(loads), {0: 1}, version=2)
    assert (senders[0].names, senders[1].names) == (["a1"], [])
    assert again.keys() == {0}
    differ = [held.tensor for held, checksum in again[0].checksums.items() if pushed[0].checksums[held] != checksum]
    assert (differ, again[0].checksums.keys()) == (["a1"], pushed[0].checksums.keys())


@pytest.mark.parametrize(("version", "calls"), [(None, [["a", "b"], ["c"], ["d"], ["e", "f"]]), (1, [[n] for n in "abcdef"])])
def test_loads_that_engines_read_where_they_lie_are_one_call(version: int | None, calls: list[list[str]]) -> None:
    """Of six loads the third is for another engine too, and the fourth is not in shared memory; changes are told by load."""
    pusher, senders = Pusher(), [Taking(), Taking()]
    delivered: list[list[str]] = []
    senders[0].deliver = lambda staged: delivered.append([piece.held.tensor for piece in staged.pieces])  # type: ignore[method-assign]
    senders[0].in_flight = 1
    for number, sender in enumerate(senders):
        pusher.connect(number, lambda sender=sender: sender)  # type: ignore[misc]
    weights = {name: torch.full((50, 4), float(number)) for number, name in enumerate("abcdef")}
    share(weight for name, weight in weights.items() if name != "d")
    loads = [load_of({name: weight}, {0, 1} if name == "c" else {0}) for name, weight in weights.items()]
    pushed = pusher.push_loads(iter(loads), dict.fromkeys(range(2)), version)
    assert delivered == calls
    assert {held.tensor: value for held, value in pushed[0].checksums.items()} == {n: digest(w) for n, w in weights.items()}
    assert senders[1].names == ["c"]


def test_the_errors_and_checksums_of_all_stages_are_put_together() -> None:
    a, b = (SliceKey.whole(name, torch.empty(1)) for name in "ab")
    merged = merge(
        [{0: Pushed({a: "1"}, nbytes=3), 1: Pushed({a: "1"})}, {}, {0: Pushed({b: "2"}, nbytes=4), 1: Pushed(error="gone")}]
    )
    assert merged == {0: Pushed({a: "1", b: "2"}, nbytes=7), 1: Pushed({a: "1"}, "gone")}


def test_every_thread_that_hashes_or_sends_chooses_the_ranks_device_first(folder: Path) -> None:
    chosen, worked = set[str](), set[str]()

    class Noting(Direct):
        is_checked = True

        def deliver(self, staged: StagedSlices) -> None:
            worked.add(threading.current_thread().name)

    pusher = Pusher(choose_device=lambda: chosen.add(threading.current_thread().name))
    sender = Noting(EmbeddedEngine(folder))
    pusher.connect(0, lambda: sender)
    pusher.push(exported(weights_of(load(folder, seed=1))))
    assert worked <= chosen
    assert {name.partition("_")[0] for name in chosen} == {"hash", "push"}


def test_an_engine_that_takes_what_all_its_senders_deliver_is_delivered_to_by_one_that_has_nothing_new() -> None:
    delivered: list[list[str]] = []

    class Together:
        in_flight, waits_for_others, is_checked = 1, True, True

        def staging(self, name: str) -> ZeroCopy:
            return ZeroCopy()

        def pieces(self, bucket: Sequence[tuple[str, Tensor]]) -> list[WeightSlice]:
            return [WeightSlice(SliceKey.whole(name, tensor), tensor) for name, tensor in bucket]

        def join(self) -> None:
            """It is here."""

        def deliver(self, staged: StagedSlices) -> None:
            delivered.append([held.tensor for held, _ in staged.pieces])

        def close(self) -> None:
            """Nothing is held."""

    pusher, values = Pusher(), torch.zeros(4)
    pusher.connect(0, Together)
    for base, version in ((None, 1), (1, 2), (2, 3)):
        load = SendBatch([WeightSlice(SliceKey.whole("w", values)._replace(engine_rank=0), values)], frozenset([0]))
        pusher.push_loads(iter([load]), {0: base}, version)
        if version == 2:
            values += 1
    assert delivered == [["w"], [], ["w"]]
