"""Waiting for many ranks: every answer under its rank, and the work grows with their number, not with its square."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import ray

from megarl.errors import DeadlineError
from megarl.workers.group import wait_for


class Answers:
    """Stands for Ray's object store: references are numbers, `arrivals` are those that come in one after the other."""

    def __init__(self, arrivals: list[list[int]]) -> None:
        self.arrivals, self.there, self.looked_at = arrivals, set[int](), 0

    def wait(self, references: list[int], *, num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        self.looked_at += len(references)
        ready = [one for one in references if one in self.there]
        if len(ready) < num_returns and timeout > 0 and self.arrivals:
            self.there |= set(self.arrivals.pop(0))
            ready = [one for one in references if one in self.there]
        done = ready[:num_returns]
        return done, [one for one in references if one not in done]

    def get(self, reference: int, **_: Any) -> str:
        return f"answer {reference}"


def test_what_arrives_together_is_taken_together() -> None:
    ranks = list(range(1000))
    names = [f"rank {rank}" for rank in ranks]
    answers = Answers([ranks[500:], ranks[:500]])
    with mock.patch.object(ray, "wait", answers.wait), mock.patch.object(ray, "get", answers.get):
        assert wait_for(ranks, phase="p", deadline_s=60, whose=names) == [f"answer {rank}" for rank in ranks]
    assert answers.looked_at < 4 * len(ranks)


def test_who_has_not_answered_is_named() -> None:
    answers = Answers([[1]])
    with (
        mock.patch.object(ray, "wait", answers.wait),
        mock.patch.object(ray, "get", answers.get),
        pytest.raises(DeadlineError, match="phase 'start' was not done after 1 s: engine 0, engine 2 had not answered") as late,
    ):
        wait_for([0, 1, 2], phase="start", deadline_s=1, whose=["engine 0", "engine 1", "engine 2"])
    assert late.value.who == "engine 0, engine 2"
