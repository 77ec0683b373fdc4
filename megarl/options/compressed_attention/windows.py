"""The tokens of a stream that make each compressed key, and which of both a query may look at; no tensor is queries by tokens.

Windows of compressed keys begin anew with every sequence. A window that ends in a segment that several sequences begin with is
compressed once for all of them, one that reaches into what they do not share once for each. A last window that is not full
makes no key. Under context parallelism each rank has the queries of its own tokens, and the keys of all are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.data.stream import PackedStream, Segment, StreamShard
from megarl.megatron.attention import QueryRange, gathered_places, query_ranges

CHUNK_ELEMENTS = 2**22
"""Scores of all heads that are computed at once."""
ROWS = 128
"""Queries of a block, at most."""


@dataclass(frozen=True)
class Windows:
    """The E windows of a stream that are compressed to one key each: places int64 `[E, m]` among the gathered tokens.

    `before` `[E, m]` are the places of the window before; `is_first` bool `[E]`: there is none. `positions` int64 `[E]` are
    those of the windows' first tokens.
    """

    tokens: Tensor
    before: Tensor
    is_first: Tensor
    positions: Tensor


@dataclass(frozen=True)
class BlockCall:
    """B blocks of queries that are computed together, padded to R queries, C tokens and K compressed keys.

    `queries` `[B, R]` are places among this rank's tokens, `positions` `[B, R]` in their sequence. `tokens` `[B, C]` are places
    among the gathered ones, the first of which has the position `first` `[B]` in the sequence, below 0 where there is none.
    `compressed` `[B, K]` are the sequence's windows in order. `source` are the places of real queries in `[B * R]`, and
    `target` those among this rank's tokens.
    """

    queries: Tensor
    positions: Tensor
    tokens: Tensor
    first: Tensor
    compressed: Tensor
    source: Tensor
    target: Tensor

    def parts(self, heads: int) -> Iterator[tuple[slice, BlockCall]]:
        """Some blocks at once, as many as `CHUNK_ELEMENTS` allow for scores of so many heads; real queries are not told."""
        blocks, rows = self.queries.shape
        columns = self.tokens.shape[1] + self.compressed.shape[1]
        at_once = max(1, CHUNK_ELEMENTS // (rows * columns * heads))
        for start in range(0, blocks, at_once):
            part = slice(start, start + at_once)
            queries, positions, tokens = self.queries[part], self.positions[part], self.tokens[part]
            first, compressed = self.first[part], self.compressed[part]
            yield part, BlockCall(queries, positions, tokens, first, compressed, self.source, self.target)

    def sees_tokens(self, window: int) -> Tensor:
        """bool `[B, R, C]`."""
        positions = (self.first[:, None] + torch.arange(self.tokens.shape[1], device=self.first.device))[:, None]
        own = self.positions[..., None]
        return (positions >= 0) & (positions <= own) & (positions > own - window)

    def sees_compressed(self, rate: int) -> Tensor:
        """bool `[B, R, K]`: those of the windows that end before a query or with it."""
        column = torch.arange(self.compressed.shape[1], device=self.first.device)
        return column < ((self.positions + 1) // rate)[..., None]


@dataclass(frozen=True)
class CompressedOrder:
    """Windows and blocks by rate (0: there are no compressed keys), and int64 `[S/cp]` ids of this rank's tokens."""

    windows: Mapping[int, Windows]
    calls: Mapping[int, tuple[BlockCall, ...]]
    token_ids: Tensor


def compressed_order(
    stream: PackedStream, share: StreamShard, rates: Iterable[int], window: int, heads: int
) -> CompressedOrder:
    """The order of `share`'s tokens for layers of these rates, `window` and `heads` on a rank; in main memory."""
    place, first_of_rank = gathered_places(share)
    windows, calls = {}, {}
    runs = [run for of_chunk in query_ranges(stream, len(share.layout), share.rank) for run in of_chunk]
    number_of = {segment.start: number for number, segment in enumerate(stream.segments)}
    for rate in rates:
        of_segments = [torch.zeros(0, dtype=torch.long)] * len(stream.segments)
        if rate:
            windows[rate], of_segments = _windows(stream, rate, place)
        blocks = [
            block
            for run in runs
            for block in _blocks(stream, run, of_segments[number_of[run.segment.start]], rate, window, heads)
        ]
        together = groupby(sorted(blocks, key=_QueryBlock.size), key=_QueryBlock.size)
        calls[rate] = tuple(_call(list(alike), place, first_of_rank) for _, alike in together)
    return CompressedOrder(windows, calls, stream.token_ids[share.positions])


def _windows(stream: PackedStream, rate: int, place: Tensor) -> tuple[Windows, list[Tensor]]:
    """The stream's windows, and by segment the numbers of those in its sequences up to its end."""
    tokens, firsts = [], []
    of_segments: list[Tensor] = []
    total = 0
    for segment in stream.segments:
        first = segment.before // rate  # the first window that ends here
        count = (segment.before + segment.length) // rate - first
        before = stream.tokens_before(segment, segment.before - max(first - 1, 0) * rate)
        places = torch.cat([before, torch.arange(segment.start, segment.start + segment.length)])
        start = segment.before - len(before)  # position of the first of `places`
        numbers = first + torch.arange(count)
        both = torch.stack([numbers, (numbers - 1).clamp(min=0)])
        tokens.append(places[both[..., None] * rate - start + torch.arange(rate)])
        firsts.append(numbers)
        above = of_segments[segment.path[-1]] if segment.path else numbers[:0]
        of_segments.append(torch.cat([above, total + torch.arange(count)]))
        total += count
    at = place[torch.cat(tokens, dim=1)]
    of_all = torch.cat(firsts)
    return Windows(at[0], at[1], of_all == 0, of_all * rate), of_segments


@dataclass(frozen=True)
class _QueryBlock:
    """Queries at places `[r]` of the stream, the first at `position`; `tokens` begin with those of the window before it."""

    queries: Tensor
    position: int
    tokens: Tensor
    window: int
    compressed: Tensor

    def size(self) -> tuple[int, int]:
        """Blocks for which this is equal are computed together."""
        return len(self.queries).bit_length(), len(self.compressed).bit_length()


def _blocks(
    stream: PackedStream, run: QueryRange, compressed: Tensor, rate: int, window: int, heads: int
) -> Iterator[_QueryBlock]:
    segment: Segment = run.segment
    before = stream.tokens_before(segment, window - 1)
    own = torch.arange(segment.start, segment.start + run.last)
    places = torch.cat([before.new_zeros(window - 1 - len(before)), before, own])
    rows = max(1, min(ROWS, CHUNK_ELEMENTS // (heads * (window + ROWS + len(compressed)))))
    for first in range(run.first, run.last, rows):
        last = min(first + rows, run.last)
        seen = compressed[: (segment.before + last) // rate if rate else 0]
        tokens = places[first : last + window - 1]
        yield _QueryBlock(own[first:last], segment.before + first, tokens, window, seen)


def _call(blocks: list[_QueryBlock], place: Tensor, first_of_rank: int) -> BlockCall:
    lengths = torch.tensor([len(block.queries) for block in blocks])
    column = torch.arange(int(lengths.max()))
    real = column < lengths[:, None]
    queries = pad_sequence([place[block.queries] - first_of_rank for block in blocks], batch_first=True)
    starts = torch.tensor([block.position for block in blocks])
    source = real.flatten().nonzero().flatten()
    return BlockCall(
        queries=queries,
        positions=starts[:, None] + column.minimum(lengths[:, None] - 1),
        tokens=place[pad_sequence([block.tokens for block in blocks], batch_first=True)],
        first=starts - blocks[0].window + 1,
        compressed=pad_sequence([block.compressed for block in blocks], batch_first=True),
        source=source,
        target=queries.flatten()[source],
    )
