"""Waiting for many answers of Ray actors: the work grows with their number, however they trickle in."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

import ray

FETCH_S = 60.0
"""For a result that is there to reach this process, however little of its call's deadline is left."""


class NotAnswered(Exception):
    """The answers at these places had not come in time."""

    def __init__(self, places: list[int]) -> None:
        super().__init__(places)
        self.places = places


class AnswerFailed(Exception):
    """The answer at a place is an error."""

    def __init__(self, place: int, error: Exception) -> None:
        super().__init__(place, error)
        self.place, self.error = place, error


def results_of(references: Sequence[Any], deadline_s: float) -> list[Any]:
    """Results of Ray references in order, each looked at once, when it is there.

    Raises:
        AnswerFailed: as soon as one is an error of Ray's.
        NotAnswered: some were not there after `deadline_s`.
    """
    futures = [reference.future() for reference in references]
    left = wait(futures, timeout=max(0.0, deadline_s), return_when=FIRST_EXCEPTION).not_done
    if left and not any(future.done() and future.exception() for future in futures):
        unseen = {reference: future for reference, future in zip(references, futures, strict=True) if future in left}
        there = ray.wait([*unseen], num_returns=len(unseen), timeout=0)[0]
        wait([unseen[reference] for reference in there], timeout=FETCH_S)
    for place, future in enumerate(futures):
        if future.done() and isinstance(error := future.exception(), ray.exceptions.RayError):
            raise AnswerFailed(place, error)
    if missing := [place for place, future in enumerate(futures) if not future.done()]:
        raise NotAnswered(missing)
    return [future.result() for future in futures]
