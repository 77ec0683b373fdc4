"""Token ids of texts in pieces, where text before a boundary gives the tokens that it gives alone.

A response so does not change the ids of its prompt, just as when the prompt was sent to an engine. The whole text is tokenised
once: special tokens part it, and what stands between two of them has tokens of its own, whatever stands around.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megarl.data.chat import special_tokens

CHECKED = 32
"""Texts at the beginning that are also tokenised prefix by prefix; where the ids differ, all are."""
SHORT = 64
"""Characters of a text, such as the header of a turn, whose ids are kept."""
MOST_KEPT = 10_000


@dataclass(frozen=True)
class _Parts:
    """A text between special tokens, each part beginning with one, and where pieces end in it."""

    parts: list[str]
    cuts: list[tuple[int, int, int]]
    """In the order of the text: a piece, the number of a part that stands in it or begins before its end, and how many
    characters of the part stand before that end (-1: all)."""


class SpanTokeniser:
    """Tokenises texts in pieces for one tokenizer."""

    def __init__(self, tokenizer: Any, *, special: bool) -> None:
        """`special`: the tokenizer adds its special tokens (BOS) before the first piece, as to plain text."""
        self._tokenizer, self._special = tokenizer, special
        self._kept: dict[str, list[int]] = {}
        self._pattern = None if special else _parting(tokenizer)
        self._checks_left = CHECKED

    def ids(self, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """The ids of every piece of every text."""
        parted = [self._part(pieces) for pieces in texts]
        wanted = {part for one in parted if one is not None for part in _wanted(one)}
        ids = self._ids_of(wanted - self._kept.keys()) | {text: self._kept[text] for text in wanted & self._kept.keys()}
        answers = []
        for pieces, one in zip(texts, parted, strict=True):
            found = None if one is None or self._pattern is None else _put_together(one, len(pieces), ids)
            if found is None or self._checks_left > 0:
                slow = self._prefix_by_prefix(pieces)
                if found is not None:
                    self._checks_left -= 1
                    if found != slow:
                        self._pattern = None
                found = slow
            answers.append(found)
        return answers

    def _part(self, pieces: Sequence[str]) -> _Parts | None:
        """None: the tokenizer is not of the kind."""
        if self._pattern is None:
            return None
        text = "".join(pieces)
        begins = [match.start() for match in self._pattern.finditer(text)]
        starts = begins if begins and begins[0] == 0 else [0, *begins]
        parts = [text[a:b] for a, b in pairwise([*starts, len(text)])]
        return _Parts(parts, _cuts(starts, len(text), list(accumulate(map(len, pieces)))))

    def _ids_of(self, texts: set[str]) -> dict[str, list[int]]:
        wanted = list(texts)
        encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(wanted, add_special_tokens=False) if wanted else []
        ids = {text: one.ids for text, one in zip(wanted, encoded, strict=True)}
        if len(self._kept) < MOST_KEPT:
            self._kept |= {text: found for text, found in ids.items() if len(text) <= SHORT}
        return ids

    def _prefix_by_prefix(self, pieces: Sequence[str]) -> list[list[int]]:
        ids: list[int] = []
        answer = []
        for at, piece in enumerate(pieces):
            whole = self._one("".join(pieces[: at + 1]), special=self._special)
            more = whole[len(ids) :] if whole[: len(ids)] == ids else self._one(piece, special=False)
            ids += more
            answer.append(more)
        return answer

    def _one(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])


def _parting(tokenizer: Any) -> re.Pattern[str] | None:
    """Special tokens before which a text may be cut; None: the tokenizer has none, or is not of the fast kind."""
    if not getattr(tokenizer, "is_fast", False) or not hasattr(tokenizer.backend_tokenizer, "encode_batch_fast"):
        return None
    tokenizer("", add_special_tokens=False)  # which sets that nothing is padded or truncated
    special = special_tokens(tokenizer)
    added = [token for token in tokenizer.added_tokens_decoder.values() if str(token)]
    if any(token.lstrip or token.single_word for token in added) or not any(str(token) in special for token in added):
        return None
    texts = sorted((str(token) for token in added if not token.normalized), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _cuts(starts: Sequence[int], length: int, ends: Sequence[int]) -> list[tuple[int, int, int]]:
    cuts = []
    part, stops = 0, [*starts[1:], length]
    for piece, end in enumerate(ends):
        while part < len(stops) and stops[part] <= end:
            cuts.append((piece, part, -1))
            part += 1
        if part < len(stops) and starts[part] < end:
            cuts.append((piece, part, end - starts[part]))
    return cuts


def _wanted(parts: _Parts) -> list[str]:
    return [parts.parts[part] if length < 0 else parts.parts[part][:length] for _, part, length in parts.cuts]


def _put_together(parts: _Parts, pieces: int, ids: dict[str, list[int]]) -> list[list[int]] | None:
    """The ids of each piece; None: a part's beginning has other tokens alone than in the part."""
    answer: list[list[int]] = [[] for _ in range(pieces)]
    part_of_done = -1
    done: list[int] = []
    for (piece, part, _), text in zip(parts.cuts, _wanted(parts), strict=True):
        whole = ids[text]
        before = done if part == part_of_done else []
        if whole[: len(before)] != before:
            return None
        answer[piece] += whole[len(before) :]
        part_of_done, done = part, whole
    return answer
