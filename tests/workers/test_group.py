"""Waiting for many ranks: every answer under its rank, and the work grows with their number, not with its square."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import ray

from megarl.errors import DeadlineError, WorkerError
from megarl.workers.group import wait_for


class Reference:
    """Stands for Ray's: its answer comes when it is told to, or was there before it was asked for."""

    def __init__(self, number: int, *, is_there: bool = False) -> None:
        self.answer, self.number, self.asked, self.is_there = Future[Any](), number, 0, is_there

    def future(self) -> Future[Any]:
        self.asked += 1
        return self.answer

    def come(self) -> None:
        self.answer.set_result(f"answer {self.number}")


def test_every_answer_is_under_its_number_and_is_looked_at_once_however_they_come() -> None:
    references = [Reference(rank) for rank in range(1000)]

    def trickle() -> None:
        for reference in reversed(references):
            reference.come()

    thread = threading.Thread(target=trickle)
    thread.start()
    found = wait_for(references, phase="p", deadline_s=60, whose=[f"rank {rank}" for rank in range(1000)])
    thread.join()
    assert found == [f"answer {rank}" for rank in range(1000)]
    assert {reference.asked for reference in references} == {1}


def test_a_failure_is_told_while_others_are_still_waited_for() -> None:
    references = [Reference(number) for number in range(3)]
    references[1].answer.set_exception(ray.exceptions.RayActorError())
    began = time.monotonic()
    with pytest.raises(WorkerError, match="engine 1 failed in phase 'start'") as failed:
        wait_for(references, phase="start", deadline_s=60, whose=["engine 0", "engine 1", "engine 2"])
    assert failed.value.who == "engine 1"
    assert time.monotonic() - began < 30


def nothing_more(references: list[Reference], **_: Any) -> tuple[list[Reference], list[Reference]]:
    """As ray.wait: those that are there, though this process has not been told."""
    there = [reference for reference in references if reference.is_there]
    threading.Timer(0.2, lambda: [reference.come() for reference in there]).start()
    return there, [reference for reference in references if not reference.is_there]


def test_who_has_not_answered_is_named() -> None:
    references = [Reference(number) for number in range(3)]
    references[1].come()
    with (
        mock.patch.object(ray, "wait", nothing_more),
        pytest.raises(DeadlineError, match="phase 'start' was not done after 1 s: engine 0, engine 2 had not answered") as late,
    ):
        wait_for(references, phase="start", deadline_s=1, whose=["engine 0", "engine 1", "engine 2"])
    assert late.value.who == "engine 0, engine 2"


def test_an_answer_that_is_there_at_the_deadline_counts() -> None:
    references = [Reference(number, is_there=True) for number in range(3)]
    with mock.patch.object(ray, "wait", nothing_more):
        found = wait_for(references, phase="start", deadline_s=0, whose=["engine 0", "engine 1", "engine 2"])
    assert found == ["answer 0", "answer 1", "answer 2"]
