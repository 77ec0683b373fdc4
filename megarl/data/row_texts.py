"""Forms of rows on their way to samples: texts in pieces, then tokens. Values and functions of them, for `supervised.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from megarl.data.chat import ChatMessage
from megarl.data.media import Media
from megarl.data.rows import Row, RowPlace
from megarl.data.turn_spans import TrainedText
from megarl.errors import DataError


@dataclass(frozen=True)
class RowText:
    """A sample as text: pieces of a conversation, and the media in them."""

    spans: list[TrainedText]
    shown: list[Any]
    only_ends: bool = False
    """Trained is only the last token of every trained piece."""


@dataclass(frozen=True)
class TextsOfRow:
    """Texts of a row: samples by the end of their ids, before they are tokenised."""

    row: Row
    row_id: str
    place: RowPlace
    sides: dict[str, RowText]
    labels: list[float]


@dataclass
class RowTokens:
    """A sample's tokens before it has an id; two are equal where the tokens are."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    media: list[Media]
    prompt_text: str = field(compare=False)
    response_text: str = field(compare=False)


@dataclass
class RowsRead:
    """Number of rows that were read."""

    rows: int = 0


def in_chunks(items: Iterator[TextsOfRow], size: int) -> Iterator[list[TextsOfRow]]:
    """Lists of `size` items; those before an error come before it."""
    chunk: list[TextsOfRow] = []
    try:
        for item in items:
            chunk.append(item)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except DataError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def media_in(messages: Sequence[ChatMessage]) -> int:
    """Pictures and videos in `messages`."""
    return sum(
        isinstance(part, dict) and part.get("type") in ("image", "video")
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    )


def share_prompt(turns: Sequence[RowTokens]) -> None:
    """Give the samples of a conversation's turns one prompt, so that shared prefixes compute what they begin with once."""
    if any(turn.media for turn in turns):
        return
    first = turns[0].prompt_ids
    common = min(
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, t.prompt_ids, strict=False))) for t in turns
    )
    if not common:
        return
    for turn in turns:
        rest = turn.prompt_ids[common:]
        turn.prompt_ids, turn.response_ids = turn.prompt_ids[:common], rest + turn.response_ids
        turn.mask = [0] * len(rest) + turn.mask
