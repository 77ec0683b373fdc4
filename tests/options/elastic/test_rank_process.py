"""What a rank's process does when others of its world are lost."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.options.elastic.rank_process import CutShort, interrupt
from megarl.workers.rank_actor import RankProcess

WAIT_S = 20.0


class Slow(torch.autograd.Function):
    """A layer whose backward pass tells that it is under way, and goes on."""

    began = threading.Event()

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return values

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Slow.began.set()
        return gradient


class BusyRank:
    """A rank that computes far longer than a test waits."""

    def __init__(self) -> None:
        self.platform = SimpleNamespace(name="cpu")
        self.ended = False

    def count(self) -> None:
        Slow.began.set()
        while not self.ended:
            pass

    def backward(self) -> None:
        values = torch.ones(1, requires_grad=True)
        output = values
        for _ in range(3_000):
            output = Slow.apply(output)
        while not self.ended:
            torch.autograd.backward(output, retain_graph=True)


@pytest.mark.parametrize("method", ["count", "backward"])
def test_what_a_rank_computes_is_cut_short(method: str) -> None:
    process = object.__new__(RankProcess)
    rank = BusyRank()
    process.rank = rank  # type: ignore[assignment]
    raised: list[BaseException] = []

    def compute() -> None:
        try:
            process.call(method)
        except BaseException as error:
            raised.append(error)

    Slow.began.clear()
    busy = threading.Thread(target=compute, daemon=True)
    busy.start()
    assert Slow.began.wait(WAIT_S)
    interrupt(process)
    busy.join(WAIT_S)
    rank.ended = True
    assert [type(error) for error in raised] == [CutShort]


def test_a_rank_that_has_left_its_world_is_left_alone() -> None:
    process = object.__new__(RankProcess)
    process.rank = None  # type: ignore[assignment]
    interrupt(process)


def test_a_rank_that_computes_nothing_is_left_alone() -> None:
    process = object.__new__(RankProcess)
    rank = BusyRank()
    process.rank = rank  # type: ignore[assignment]
    interrupt(process)
    rank.ended = True
    process.call("count")
