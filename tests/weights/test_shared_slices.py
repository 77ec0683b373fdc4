"""What lies in shared memory is read by engines where it lies; anything else is copied into buffers."""

from __future__ import annotations

import base64
import multiprocessing
import pickle
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.platform.shared_memory import share
from megarl.weights.checksums import digest
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.sglang_loader import load
from megarl.weights.staging import SharedSlices, Staging
from tests.weights.test_sglang_loader import Model

SHAPES = {"a.weight": (6, 5), "b.weight": (4, 5), "c.bias": (7,)}


def parameters() -> dict[str, Tensor]:
    """Views of one block, as megatron-core's buffer has them, and a tensor of its own."""
    block = torch.randn(60)
    views = {"a.weight": block[2:32].view(6, 5), "b.weight": block[36:56].view(4, 5)}
    return views | {"c.bias": torch.randn(7)}


def pieces(tensors: dict[str, Tensor]) -> list[WeightSlice]:
    return [WeightSlice(SliceKey.whole(name, one)._replace(engine_rank=0), one) for name, one in tensors.items()]


def engine(pipe: Any) -> None:
    """Another process, with a model: takes payloads, and answers what it then holds."""
    model = Model(**{name.replace(".", "__"): shape for name, shape in SHAPES.items()})
    while (payload := pipe.recv()) is not None:
        load(model, pickle.loads(base64.b64decode(payload)))
        pipe.send({name: values.detach().numpy().tobytes() for name, values in model.named_parameters()})


@pytest.fixture(scope="module")
def other_process() -> Any:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine, args=(theirs,))
    process.start()
    yield ours
    ours.send(None)
    process.join(60)


def held_after(other_process: Any, payload: str | None) -> dict[str, bytes]:
    other_process.send(payload)
    return other_process.recv()


def test_an_engine_reads_shared_weights_where_they_lie_also_after_they_changed(other_process: Any) -> None:
    tensors = parameters()
    before = {name: one.clone() for name, one in tensors.items()}
    share(tensors.values())
    assert all(torch.equal(one, before[name]) for name, one in tensors.items())
    staging = Staging(name="0")
    for _ in range(2):
        staged = staging.stage(pieces(tensors))
        assert isinstance(staged, SharedSlices)
        assert held_after(other_process, staged.payloads(1)[0]) == {n: one.numpy().tobytes() for n, one in tensors.items()}
        assert [staged.digest(piece) for piece in staged.pieces] == [digest(one.clone()) for one in tensors.values()]
        for one in tensors.values():
            one.mul_(-3)
    assert staging.bytes == 0


def test_only_what_changed_is_read(other_process: Any) -> None:
    tensors = parameters()
    share(tensors.values())
    staged = Staging(name="1").stage(pieces(tensors))
    held = held_after(other_process, staged.payloads(1)[0])
    for one in tensors.values():
        one.add_(1)
    held_now = held_after(other_process, staged.only(staged.pieces[1:2]).payloads(1)[0])
    assert held_now == held | {"b.weight": tensors["b.weight"].numpy().tobytes()}


def test_views_of_what_is_shared_stay_views() -> None:
    block = torch.zeros(8)
    view = block[2:6]
    share([view])
    view += 1
    assert block.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert block.is_shared()


def test_each_rank_of_an_engine_is_told_of_its_own_pieces_only() -> None:
    tensors = parameters()
    share(tensors.values())
    first, second, third = pieces(tensors)
    of_ranks = [first, WeightSlice(second.held._replace(engine_rank=1), second.tensor), third]
    *payloads, for_nobody = Staging(name="2").stage(of_ranks).payloads(3)
    assert for_nobody is None
    told = [[spec[0] for (_, (specs, _)), _ in pickle.loads(base64.b64decode(one or "")) for spec in specs] for one in payloads]
    assert told == [["a.weight", "c.bias"], ["b.weight"]]


@pytest.mark.parametrize("what", ["columns", "one tensor that is not shared"])
def test_anything_else_is_copied(what: str) -> None:
    tensors = parameters()
    share(tensors.values())
    if what == "columns":
        tensors["a.weight"] = tensors["a.weight"][:, 1:3]
    if what.startswith("one"):
        tensors["c.bias"] = torch.randn(7)
    staging = Staging()
    staged = staging.stage(pieces(tensors))
    assert staging.bytes > 0
    assert not isinstance(staged, SharedSlices)
    assert all(torch.equal(copy.tensor, tensors[copy.held.tensor]) for copy in staged.pieces)


def test_weights_are_not_shared_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * 4 * 1000 - 1))
    weight = torch.zeros(1000)
    share([weight])
    assert not weight.is_shared()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * 4 * 1000))
    share([weight])
    assert weight.is_shared()


def test_sharing_twice_moves_nothing() -> None:
    weight = torch.zeros(1000)
    share([weight])
    address = weight.data_ptr()
    share([weight, weight[1:]])
    assert weight.data_ptr() == address
