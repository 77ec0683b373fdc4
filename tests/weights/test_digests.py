"""Sums of checksums say what checksums box by box say, and where they differ the rank and the tensor are found."""

from __future__ import annotations

import asyncio
import base64
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore
from transformers import LlamaConfig

from megarl.errors import EngineError
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions, SglangServer
from megarl.weights import sglang_loader
from megarl.weights.checksums import UNCHECKED, EngineLayout
from megarl.weights.digests import SentDigests, by_engine, combined, coverage, coverage_by_rank, sums_by_rank
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.payloads import INTAKE
from megarl.weights.pusher import Pushed, PushSummary, UpdateSummary
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.received import ReceivedBoxes, ReceivedDigests
from megarl.weights.sglang_senders import checksums_of, put_before
from megarl.weights.sglang_targets import EVERY_RANK, EngineTarget
from megarl.weights.staging import Staging, serialize
from tests.weights.test_sglang_loader import Model

SIZES = {"vocab_size": 128, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
LAYOUT = EngineLayout(
    ServedModel(LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES).to_dict(), "float32"), EngineTarget(tp=2)
)
BOXES = [SliceKey(f"layers.{n % 7}.weight", n % 3 - 1, 40, n, 0, 1 + n % 5, 8) for n in range(40)]


def test_sums_do_not_depend_on_order_or_on_who_adds_what_and_see_every_exchange() -> None:
    checksums = {box: f"{number:032x}" for number, box in enumerate(BOXES)}
    items = list(checksums.items())
    shuffled = random.Random(0).sample(items, len(items))
    assert combined(shuffled) == combined(items)
    parts = [dict(shuffled[start::4]) for start in range(4)]
    merged = by_engine([sums_by_rank(part, engine) for part in parts for engine in (5, 2)])
    assert [*merged] == [2, 5]
    for engine in merged.values():
        assert engine.coverage == coverage_by_rank(BOXES)
        for rank in (EVERY_RANK, 0, 1):
            assert engine.sums[rank] == combined((box, value) for box, value in items if box.engine_rank == rank)
    for number in range(1, len(items)):
        exchanged = checksums | {BOXES[0]: items[number][1], BOXES[number]: items[0][1]}
        assert combined(exchanged.items()) != combined(items)


def test_coverage_is_that_of_the_elements_however_a_tensor_is_cut() -> None:
    whole = SliceKey("w", 1, 12, 0, 0, 12, 10)
    parts = [SliceKey("w", 1, 12, row, col, 4, 5) for row in (0, 4, 8) for col in (0, 5)]
    assert coverage([whole]) == coverage(parts)
    assert coverage([whole]) != coverage(parts[1:]) != coverage([*parts[1:], parts[0]._replace(tensor="v")])
    assert coverage([whole]) != coverage([whole._replace(engine_rank=0)])


def test_what_is_sent_unchecked_counts_as_sent_and_has_no_sums() -> None:
    [sent] = by_engine([sums_by_rank(dict.fromkeys(BOXES, UNCHECKED))]).values()
    assert sent.coverage == coverage_by_rank(BOXES)
    assert sent.sums == {}
    assert by_engine([sums_by_rank({})]) == by_engine([]) == {}


def test_the_summary_of_an_update_has_every_ranks_sums_the_first_error_and_all_bytes() -> None:
    one = {0: Pushed({BOXES[0]: "1"}, nbytes=3), 1: Pushed({BOXES[0]: "1"})}
    other = {0: Pushed({BOXES[1]: "2"}, nbytes=4), 1: Pushed(error="gone")}
    update = UpdateSummary.of([PushSummary.of(pushed) for pushed in (one, {}, other, {1: Pushed(error="later")})])
    assert update.errors == {1: "gone"}
    assert update.nbytes == 7
    both = {BOXES[0]: "1", BOXES[1]: "2"}
    assert np.array_equal(update.sent[0].rows, by_engine([sums_by_rank(both)])[0].rows)
    assert pickle.loads(pickle.dumps(update)).sent[1].sums == by_engine([sums_by_rank({BOXES[0]: "1"})])[0].sums


class Ranks:
    """The two ranks of a server, each with parameters and a loader's memory of its own, and the questions they are asked.

    One after the other takes what is put before it, each in several threads.
    """

    planted: tuple[int, str] | None = None
    """A parameter of a rank in which one byte is wrong when the next update has come."""

    def __init__(self) -> None:
        shapes: list[dict[str, tuple[int, ...]]] = [{}, {}]
        for box in LAYOUT.expected():
            name = re.sub(r"\b[qkv]_proj", "qkv_proj", re.sub(r"\b(gate|up)_proj", "gate_up_proj", box.tensor))
            before = shapes[box.engine_rank].get(name, (0,))[0]
            shapes[box.engine_rank][name] = (before + box.rows, *([box.cols] if not name.endswith("norm.weight") else []))
        self.models = [Model(**shape) for shape in shapes]
        self.memory = [{"_boxes": ReceivedBoxes(), "_received": ReceivedDigests()} for _ in shapes]
        self.questions = list[list[str]]()

    async def post(self, session: Any, endpoint: str, body: dict[str, Any]) -> Any:
        """Answer one request."""
        if endpoint == "update_weights_from_tensor":
            await asyncio.to_thread(self.load, body["serialized_named_tensors"])
        return {}

    def load(self, payloads: list[str]) -> None:
        """Have each rank load its payload."""
        contents = [pickle.loads(base64.b64decode(payload)) for payload in payloads]
        asked = [content[0][0][0] if content else "" for content in contents]
        if INTAKE not in asked:
            self.questions.append(asked)
        for model, memory, content in zip(self.models, self.memory, contents, strict=True):
            with mock.patch.multiple(sglang_loader, **memory):
                sglang_loader.load(model, content)
        if self.planted is not None:
            (rank, name), self.planted = self.planted, None
            with torch.no_grad():
                self.models[rank].parameters[name].view(torch.uint8).flatten()[1] ^= 4


class Served(NamedTuple):
    """An engine, the ranks of its server, and the loop in which it lives."""

    engine: SglangEngine
    ranks: Ranks
    loop: asyncio.Runner


def drawn(version: int) -> list[WeightSlice]:
    """All that the engine's ranks hold, cut in two where there is more than one row."""
    made, pieces = torch.Generator().manual_seed(version), []
    for box in LAYOUT.expected():
        half = max(1, box.rows // 2)
        for first, rows in ((0, half), (half, box.rows - half)):
            if rows:
                key = box._replace(row=first, col=0, rows=rows)
                pieces.append(WeightSlice(key, torch.randn(rows, box.cols, generator=made)))
    return pieces


def update(
    served: Served, version: int, *, base: int | None = None, verify: bool = True, lost: int | None = None,
    planted: tuple[int, str] | None = None, left_out: int = 0,
) -> tuple[SentDigests, dict[SliceKey, str]]:  # fmt: skip
    """Begin an update, send it by two senders at once and return what they tell, all of it and box by box.

    `lost`: a piece that does not come. `planted`: a parameter of a rank with one wrong byte. `left_out`: how many pieces nobody
    sends.
    """
    engine, ranks, loop = served
    loop.run(engine.begin_update(version, base))
    ranks.planted = planted
    pieces = drawn(version if base is None else base)
    changed = range(0, len(pieces), 3) if base is not None else range(len(pieces))
    pieces = [WeightSlice(held, drawn(version)[n].tensor if n in changed else value) for n, (held, value) in enumerate(pieces)]
    staged = [Staging(1).stage(pieces[left_out + start :: 2]) for start in range(2)]
    for part in staged:
        came = [piece for number, piece in enumerate(part.pieces) if number != lost]
        if base is not None:
            came = [piece for piece in came if any(piece.held == pieces[n].held for n in changed)]
        put_before(engine.endpoint, part.only(came).payloads(2), timeout_s=20)
    pushed = [{0: Pushed(checksums_of(part, values=verify))} for part in staged]
    summary = UpdateSummary.of([PushSummary.of(one) for one in pushed])
    return summary.sent[0], {box: value for one in pushed for box, value in one[0].checksums.items()}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    engine = SglangEngine(SglangServer(ServerOptions("model", tmp_path / "log")), LAYOUT, store=store)
    engine._endpoint = engine.endpoint.__class__(engine.endpoint.url, LAYOUT, "token", ("127.0.0.1", store.port))
    ranks = Ranks()
    engine._client._post = ranks.post  # type: ignore[method-assign,assignment]
    with asyncio.Runner() as loop:
        yield Served(engine, ranks, loop)
        engine._close_intake()  # which a test that failed has left open


def end(served: Served, version: int, sent: SentDigests) -> list[int]:
    return [*served.loop.run(served.engine.end_update_by_sums(version, sent))]


def test_updates_whole_and_of_what_changed_are_checked_by_one_question_that_names_no_box(served: Served) -> None:
    engine, ranks, _ = served
    bases, verified = [None, 1, 2, None, 4, None], [True, True, False, False, True, True]
    for version, base, verify in zip(range(1, 7), bases, verified, strict=True):
        sent, _ = update(served, version, base=base, verify=verify)
        ranks.questions.clear()
        assert end(served, version, sent) == []
        assert engine.weight_version == version
        assert ranks.questions == ([["sum", "sum"]] if verify else [])


def named(served: Served, version: int, sent: SentDigests, boxes: dict[SliceKey, str]) -> tuple[Any, str]:
    """The ranks in doubt, and what the error says then."""
    engine, ranks, loop = served
    doubtful = end(served, version, sent)
    assert engine.weight_version is None
    ranks.questions.clear()
    asked = {box: value for box, value in boxes.items() if box.engine_rank in doubtful}
    with pytest.raises(EngineError) as error:
        loop.run(engine.end_update(version, asked))
    assert engine.weight_version is None
    return doubtful, str(error.value)


@pytest.mark.parametrize("base", [None, 1])
def test_a_wrong_byte_in_one_rank_is_found_by_asking_that_rank_and_named_with_its_tensor(
    served: Served, base: int | None
) -> None:
    sent, _ = update(served, 1)
    assert end(served, 1, sent) == []
    sent, boxes = update(served, 2, base=base, planted=(1, "model.layers.1.self_attn.o_proj.weight"))
    doubtful, said = named(served, 2, sent, boxes)
    assert doubtful == [1]
    assert "values differ from those sent for model.layers.1.self_attn.o_proj.weight@1" in said
    assert "(1 differ, 0 missing, 0 unknown of" in said
    assert served.ranks.questions == [["", "check"]]


def test_a_piece_that_did_not_come_is_named(served: Served) -> None:
    sent, boxes = update(served, 1, lost=4)
    doubtful, said = named(served, 1, sent, boxes)
    assert doubtful == sorted({piece.held.engine_rank for piece in drawn(1)[8:10]}), "each of two senders lost its fifth piece"
    assert "values differ from those sent for" in said


@pytest.mark.parametrize("verify", [True, False])
def test_what_nobody_sent_is_named_whether_or_not_checksums_are_taken(served: Served, verify: bool) -> None:
    sent, boxes = update(served, 1, verify=verify, left_out=1)
    doubtful, said = named(served, 1, sent, boxes)
    assert doubtful == [drawn(1)[0].held.engine_rank]
    assert f"nobody sent {drawn(1)[0].held.tensor}" in said
    assert "1 missing" in said
    assert served.ranks.questions == [], "a server is not asked what it holds of weights that are not there"


def test_sums_of_other_boxes_than_those_that_came_are_only_a_doubt(served: Served) -> None:
    """As after an update that was broken off and cut the tensors otherwise."""
    engine, ranks, loop = served
    for box in list(LAYOUT.expected())[:4]:
        ranks.memory[box.engine_rank]["_boxes"].note([(*box._replace(row=0, col=0), "float32", 0, 0)])  # type: ignore[attr-defined]
    sent, boxes = update(served, 1)
    doubtful = end(served, 1, sent)
    assert doubtful
    loop.run(engine.end_update(1, {box: value for box, value in boxes.items() if box.engine_rank in doubtful}))
    assert engine.weight_version == 1
    sent, _ = update(served, 2)
    assert end(served, 2, sent) == []


def test_what_is_asked_of_one_engine_travels_in_a_few_bytes_for_each_rank() -> None:
    boxes = {SliceKey(f"t{n}", n % 8, 4, 0, 0, 4, 4): f"{n:032x}" for n in range(8000)}
    summary = PushSummary.of({0: Pushed(boxes), 1: Pushed(boxes)})
    assert len(pickle.dumps(summary)) < 2 * 8 * 48 + 1000
    assert len(serialize([])) < 100
