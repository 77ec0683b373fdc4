"""Weights over process groups: from where a sender holds them to where a rank of an engine does, without SGLang."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import Tensor

from megarl.errors import EngineError
from megarl.reshard.rank_plan import SliceKey, WeightSlice
from megarl.reshard.targets import EngineTarget
from megarl.weight_sync import sglang_loader, sglang_senders
from megarl.weight_sync.checksums import EngineLayout
from megarl.weight_sync.model_compatibility import ServedModel
from megarl.weight_sync.sglang_senders import GroupSender, ServerEndpoint
from megarl.weight_sync.staging import StagedSlices
from tests.rollout.tiny import free_address
from tests.weight_sync.test_sglang_loader import Model
from tests.world import World

Q, K, V = (torch.arange(8.0 * rows).reshape(rows, 8) + 100 * rows for rows in (4, 2, 2))
NORM = torch.arange(8.0)
OUT = torch.arange(24.0).reshape(3, 8)
EXPERT = torch.arange(12.0).reshape(3, 4)


ENDPOINT = ServerEndpoint("http://engine", EngineLayout(ServedModel({}, "float32"), EngineTarget(tp=2)), "token")


class Answered:
    """A request that the engine is answering: `already`, or not before the values are there."""

    def __init__(self, already: bool = False) -> None:
        self._already = already

    def ended_within(self, wait_s: float) -> bool:
        """Whether there is an answer."""
        return self._already

    def raise_if_failed(self) -> None:
        """It is a good one."""

    def result(self) -> None:
        """It took them."""


def sends(addresses: list[tuple[str, int]]) -> None:
    """Two connections in turn; over each, two calls to the two ranks of an engine, which hold four columns of each matrix."""

    def call(_: Any, __: str, body: dict[str, Any], ___: float) -> Answered:
        torch.distributed.broadcast_object_list([body["serialized_named_tensors"]], src=0)
        return Answered()

    with mock.patch.object(sglang_senders, "check_alive"), mock.patch.object(sglang_senders, "_CallUnderWay", call):
        for address in addresses:
            with GroupSender(ENDPOINT, address, timeout_s=30) as sender:
                for factor in (1, 2):
                    pieces = [WeightSlice(SliceKey.whole("x.experts.0.up_proj.weight", EXPERT), factor * EXPERT)]
                    for rank in range(2):
                        pieces.append(WeightSlice(SliceKey("x.norm.weight", rank, 8, 0, 0, 8, 1), (factor * NORM).bfloat16()))
                        for name, matrix in (("q", Q), ("k", K), ("v", V)):
                            held = SliceKey(f"x.self_attn.{name}_proj.weight", rank, len(matrix), 0, 0, len(matrix), 4)
                            pieces.append(WeightSlice(held, factor * matrix[:, 4 * rank : 4 * rank + 4]))
                        for col in (4, 0):  # halves that lie on two ranks of the trainer
                            held = SliceKey("x.o_proj.weight", rank, 3, 0, col, 3, 4)
                            pieces.append(WeightSlice(held, (factor * OUT)[:, col : col + 4]))
                    # first all together, then each alone
                    with mock.patch.object(sglang_senders, "SMALL_BYTES", 2**20 if factor == 1 else 0):
                        sender.deliver(StagedSlices(pieces))


def receives(rank: int, calls: int) -> list[dict[str, Tensor]]:
    """What rank `rank` of the engine holds after each call."""
    found = []
    model = Model(x__self_attn__qkv_proj__weight=(8, 4), x__norm__weight=(8,), x__o_proj__weight=(3, 8))
    for _ in range(calls):
        payloads: list[Any] = [None]
        torch.distributed.broadcast_object_list(payloads, src=0)
        sglang_loader.load(model, pickle.loads(base64.b64decode(payloads[0][rank])))
        found.append({name: value.detach().clone() for name, value in [*model.parameters.items(), *model.loaded]})
        assert len(sglang_loader._groups) == 1  # of a connection that was replaced nothing is kept
    return found


def played(rank: int, world_size: int, addresses: list[tuple[str, int]]) -> list[dict[str, Tensor]]:
    """Rank 0 sends, the others are the engine."""
    return receives(rank - 1, 2 * len(addresses)) if rank else sends(addresses) or []


def test_slices_whole_tensors_and_other_dtypes_arrive_in_each_rank_over_new_connections_too(
    world: World, tmp_path: Path
) -> None:
    addresses = [free_address() for _ in range(2)]
    _, *ranks = world.call(played, addresses, size=3)
    for rank, answers in enumerate(ranks):
        assert len(answers) == 4
        for answer, factor in zip(answers, (1, 2, 1, 2), strict=True):
            columns = slice(4 * rank, 4 * rank + 4)
            assert torch.equal(answer["x.self_attn.qkv_proj.weight"], factor * torch.cat([Q, K, V])[:, columns])
            assert torch.equal(answer["x.norm.weight"], factor * NORM)  # a float32 parameter of a bfloat16 model
            assert torch.equal(answer["x.o_proj.weight"], factor * OUT)
            assert torch.equal(answer["x.experts.0.up_proj.weight"], factor * EXPERT)


def test_an_engine_that_answers_without_asking_for_the_weights_is_an_error() -> None:
    with (
        mock.patch.object(sglang_senders, "check_alive"),
        mock.patch.object(sglang_senders, "_CallUnderWay", return_value=Answered(already=True)),
        GroupSender(ENDPOINT, free_address(), timeout_s=30) as sender,
        pytest.raises(EngineError, match="http://engine answered an update before it had asked for the weights"),
    ):
        sender.deliver(StagedSlices([WeightSlice(SliceKey.whole("x.experts.0.up_proj.weight", EXPERT), EXPERT)]))
