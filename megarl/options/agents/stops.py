"""Ends a turn where a client wants it to end: behind the first of its stop strings, or behind one of its stop tokens.

Engines are sent token ids and know no text, so a turn with such an end is sampled in pieces. What an engine had sampled behind
the end is dropped: the tokens up to an end that depends on them alone are distributed as if sampling had stopped there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from megarl.data.columns import cut
from megarl.rollout.engines.protocol import Generation, behind

PIECE_TOKENS = 64
"""Tokens that are asked for at once: at most so many, less one, are sampled in vain."""


@dataclass(frozen=True)
class Stops:
    """The ends of a turn beside where the policy ends it: behind any of `strings`, or of `token_ids`."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.strings or self.token_ids)


@dataclass(frozen=True)
class Stopped:
    """The way in which a turn was ended: by what, and its text before that."""

    by: str | int
    text: str


async def sample_until(
    stops: Stops,
    sample: Callable[[list[int], int], Awaitable[Generation]],
    ids: Sequence[int],
    most: int,
    text_of: Callable[[Sequence[int]], str],
    piece_tokens: int = PIECE_TOKENS,
) -> tuple[Generation, int, Stopped | None]:
    """At most `most` tokens behind `ids`, up to the first of `stops`; how many more were sampled, and what ended them.

    `text_of` is the text of sampled tokens, special ones included. Raises what `sample` raises.
    """
    taken: Generation | None = None
    while True:
        have = len(taken.response_ids) if taken is not None else 0
        limit = min(piece_tokens, most - have)
        piece = await sample([*ids, *(taken.response_ids if taken is not None else ())], limit)
        taken = piece if taken is None else behind(taken, piece)
        first_stop = _first(stops, taken.response_ids, have, text_of)
        if first_stop is not None:
            length, stopped = first_stop
            return _cut(taken, len(ids), length), len(taken.response_ids) - length, stopped
        may_go_on = piece.finish_reason == "length" and len(piece.response_ids) == limit
        if not may_go_on or len(taken.response_ids) == most:
            return taken, 0, None


def _first(stops: Stops, ids: Sequence[int], start: int, text_of: Callable[[Sequence[int]], str]) -> tuple[int, Stopped] | None:
    """The least number of tokens, more than `start`, that end with one of `stops`."""
    has_string = any(stop in text_of(ids) for stop in stops.strings)
    for length in range(start + 1, len(ids) + 1):
        if ids[length - 1] in stops.token_ids:
            return length, Stopped(ids[length - 1], text_of(ids[: length - 1]))
        text = text_of(ids[:length]) if has_string else ""
        places = {text.find(stop): stop for stop in stops.strings if stop in text}
        if places:
            return length, Stopped(places[min(places)], text[: min(places)])
    return None


def _cut(whole: Generation, prompt_tokens: int, length: int) -> Generation:
    """The first `length` tokens of `whole`, as a turn that ended there. Token columns are of passes under its last version
    alone."""
    versions, tokens = whole.weight_versions, prompt_tokens + length - 1
    return replace(
        whole,
        response_ids=whole.response_ids[:length],
        log_probs=whole.log_probs[:length],
        weight_versions=versions[:length],
        finish_reason="stop",
        extra=cut(whole.extra, tokens, known=tokens if versions[length - 1] == versions[-1] else 0),
    )
