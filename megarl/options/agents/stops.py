"""Tells a client what ended its turn, and the text before that: engines end turns, and a turn keeps the tokens of its stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.rollout.engines.stops import Stops


@dataclass(frozen=True)
class Stopped:
    """The way in which a turn was ended: by what, and its text before that."""

    by: str | int
    text: str


def stopped(stops: Stops, ids: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> Stopped | None:
    """The stop with which the turn `ids` ended; None: with none of `stops`.

    `text_of` is the text of sampled tokens, special ones included.
    """
    if ids and ids[-1] in stops.token_ids:
        return Stopped(ids[-1], text_of(ids[:-1]))
    text = text_of(ids) if stops.texts else ""
    places = {text.find(stop): stop for stop in stops.texts if stop in text}
    return Stopped(places[min(places)], text[: min(places)]) if places else None
