"""Common beginnings of the responses to a prompt: turns of one episode, branches of an agent's history. Pure arithmetic.

Tokens are computed once for all responses that have them, and the same tokens before them. A tree of prefixes says which these
are: each node is a run of tokens behind those of its parent, the root's children stand behind the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LEAST_SHARED = 16
"""Fewer common tokens behind a prompt are computed by each response: a level of the tree is one more pass of attention."""

Tokens = npt.NDArray[np.integer[Any]]


class CommonPrefixes(NamedTuple):
    """Common beginnings of R responses: `order`, their numbers with common beginnings beside each other, and how many
    tokens each has in `common`
    with the next in that order (R - 1 numbers; 0: it shares the prompt alone).
    """

    order: tuple[int, ...]
    common: tuple[int, ...]

    def repeats(self, chosen: Iterable[int]) -> tuple[int, ...]:
        """Number of first tokens that each of the responses `chosen` need not compute because another one of them does,
        if any."""
        if not self.common:
            return ()
        chosen_set, repeated = set(chosen), []
        least: int | None = None
        for number, common in zip(self.order, (0, *self.common), strict=True):
            least = min(least, common) if least is not None else None
            if number in chosen_set:
                repeated += [least] if least else []
                least = _ENDLESS
        return tuple(repeated)

    def among(self, members: Sequence[int]) -> CommonPrefixes:
        """Common beginnings of the responses `members` alone, numbered by their places in it."""
        if not self.common:
            return NOTHING_SHARED
        place = {member: index for index, member in enumerate(members)}
        order: list[int] = []
        commons: list[int] = []
        least = _ENDLESS
        for number, common in zip(self.order, (0, *self.common), strict=True):
            least = min(least, common)
            if number in place:
                commons += [least] if order else []
                order.append(place[number])
                least = _ENDLESS
        return CommonPrefixes((*order,), (*commons,)) if any(commons) else NOTHING_SHARED


_ENDLESS = 1 << 62
NOTHING_SHARED = CommonPrefixes((), ())
"""Prefixes of responses that share their prompt alone."""


class Node(NamedTuple):
    """The tokens `start` to `end` (excluded) of the response `member`, computed for it and all whose path passes here.

    `parent` is the number of the node before, -1 the prompt.
    """

    parent: int
    member: int
    start: int
    end: int


def common_prefixes(responses: Sequence[Tokens]) -> CommonPrefixes:
    """Find the `responses` that begin with the same tokens."""
    starts: dict[bytes, list[int]] = {}
    for number, tokens in enumerate(responses):
        key = _ordered(tokens[:LEAST_SHARED]) if len(tokens) >= LEAST_SHARED else b""
        starts.setdefault(key, []).append(number)
    order: list[int] = []
    common: list[int] = []
    for key, numbers in starts.items():
        together = sorted(numbers, key=lambda number: _ordered(responses[number])) if key and len(numbers) > 1 else numbers
        lengths = [_common(responses[a], responses[b]) if key else 0 for a, b in pairwise(together)]
        common += ([0] if order else []) + lengths
        order += together
    return CommonPrefixes(tuple(order), tuple(common))


def prefix_tree(found: CommonPrefixes, lengths: Sequence[int]) -> tuple[list[Node], list[int]]:
    """The nodes, parents first and those below a node behind each other; and at which of them each response ends (-1: none).

    `lengths` are the tokens of each response; the last of them need not be among those that were compared.
    """
    nodes: list[Node] = []
    ends = [-1] * len(lengths)
    open_ranges = [(0, len(found.order), 0, -1)] if lengths else []
    while open_ranges:
        first, last, depth, parent = open_ranges.pop()
        member = min(found.order[first:last])
        if last - first == 1:
            if lengths[member] > depth:
                nodes.append(Node(parent, member, depth, lengths[member]))
                parent = len(nodes) - 1
            ends[member] = parent
            continue
        shared = min(found.common[first : last - 1])
        if shared > depth:
            nodes.append(Node(parent, member, depth, shared))
            parent = len(nodes) - 1
        cuts = [first, *(at + 1 for at in range(first, last - 1) if found.common[at] == shared), last]
        below = sorted(pairwise(cuts), key=lambda cut: min(found.order[slice(*cut)]), reverse=True)
        open_ranges += [(start, end, shared, parent) for start, end in below]
    return nodes, ends


def _ordered(tokens: Tokens) -> bytes:
    """Bytes that are ordered as the tokens, which are not negative, are."""
    return tokens.astype(">i4").tobytes()


def _common(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
