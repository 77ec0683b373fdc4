"""Which queries of a stream may look at which keys, laid for attention to chosen keys: no tensor here is queries by keys.

As `megatron/attention.py` lays them for full attention: runs of queries of similar length are computed together, and under
context parallelism each rank has the queries of its own tokens and the keys of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from megarl.data.stream import PackedStream, StreamShard
from megarl.data.stream_sequences import token_sequences
from megarl.megatron.attention import QueryRange, gathered_places, query_ranges

CHUNK_ELEMENTS = 2**22
"""Scores that are computed at once: so many queries are taken together that all heads' scores of their keys are no more."""


@dataclass(frozen=True)
class QueryRows:
    """Queries `first` to `last` (excluded) of each run of a call, which look at no key behind the first `keys` of it."""

    first: int
    last: int
    keys: int


@dataclass(frozen=True)
class IndexedCall:
    """B runs of queries that are computed together, padded to R queries and C keys.

    `queries` int64 `[B, R]` are places among this rank's tokens and `keys` int64 `[B, C]` among the gathered ones (0 where
    padded). A run's keys are `prefix` int64 `[B]` tokens before it, padded to `width`, and those of its segment, of which its
    query r sees `own[b, r]` and those before. `real` bool `[B, R]`: which queries do not only fill a run up; `source` int64
    `[M]` are their places in `[B * R]`, and `target` int64 `[M]` those among this rank's tokens. `furthest` is the largest of
    `own[:, 0]`.
    """

    queries: Tensor
    keys: Tensor
    prefix: Tensor
    own: Tensor
    real: Tensor
    source: Tensor
    target: Tensor
    width: int
    furthest: int

    def chunks(self, heads: int) -> Iterator[QueryRows]:
        """All queries, as many at once as `CHUNK_ELEMENTS` allow for scores of so many heads."""
        runs, rows = self.queries.shape
        at_once = max(1, CHUNK_ELEMENTS // (runs * heads * self.keys.shape[1]))
        for first in range(0, rows, at_once):
            last = min(rows, first + at_once)
            yield QueryRows(first, last, min(self.keys.shape[1], self.width + self.furthest + last))

    def visible(self, rows: QueryRows) -> Tensor:
        """bool `[B, rows, keys]`: the keys that queries may look at."""
        column = torch.arange(rows.keys, device=self.keys.device)
        in_prefix = column < self.prefix[:, None]
        own = column - self.width
        return in_prefix[:, None] | ((own >= 0) & (own <= self.own[:, rows.first : rows.last, None]))


@dataclass(frozen=True)
class IndexedOrder:
    """The calls of this rank's queries, and the choices that layers have made for the micro-batch so far.

    `weights` float32 `[n]` say how many sequences each of this rank's n tokens belongs to, where indexers are trained.
    `told` are the choices that come with the stream; None: none do. `choices`, under `IndexedAttention.kept_under`, are int32
    `[n, k]`: of each token the columns, in its call's keys, of those that it attends to; if they are fewer than k, the first
    one again.
    """

    calls: tuple[IndexedCall, ...]
    weights: Tensor | None = None
    told: ToldKeys | None = None
    choices: dict[int, Tensor] = field(default_factory=dict)

    def width(self, top_k: int) -> int:
        """Keys that a query chooses at most."""
        return min(top_k, max((call.keys.shape[1] for call in self.calls), default=1))


class ToldKeys:
    """The choices that come with this rank's n tokens, `bits` uint8 `[indexers, n, W]` as in `column.py`.

    They stay in main memory, and a layer's are on a device while it chooses. `counted` are the indexers whose choices are.
    """

    def __init__(self, bits: Tensor) -> None:
        self.bits = bits
        self.counted: set[int] = set()


def told_bits(bits: Tensor, call: IndexedCall, rows: QueryRows) -> Tensor:
    """bool `[B, rows, keys]`: the columns of a call that `bits` `[n, W]`, by position in the sequence, set for its queries."""
    column = torch.arange(rows.keys, device=bits.device)
    prefix = call.prefix[:, None]
    position = torch.where(column < prefix, column, column - call.width + prefix).clamp(0, 8 * bits.shape[1] - 1)
    of_queries = bits[call.queries[:, rows.first : rows.last]]
    of_bytes = of_queries.gather(-1, (position // 8)[:, None].expand(*of_queries.shape[:2], -1))
    return (of_bytes >> (position % 8).to(torch.uint8)[:, None] & 1).bool()


def chosen_keys(choices: Tensor, call: IndexedCall, rows: QueryRows) -> Tensor:
    """bool `[B, rows, keys]`: the keys that queries have chosen, by `IndexedOrder.choices`."""
    columns = choices[call.queries[:, rows.first : rows.last]].clamp(max=rows.keys - 1).long()  # a padded query has another's
    is_chosen = torch.zeros(*columns.shape[:-1], rows.keys, dtype=torch.bool, device=choices.device)
    return is_chosen.scatter_(-1, columns, True)


def indexed_order(stream: PackedStream, share: StreamShard, *, weighted: bool, told: ToldKeys | None = None) -> IndexedOrder:
    """The calls of the tokens that `share` holds of `stream`, in main memory, with weights if they are asked for."""
    gathered_index, first_of_rank = gathered_places(share)
    weights = None
    if weighted:
        sequences = token_sequences(stream)
        weights = sequences.weights[sequences.segment[share.positions]]
    return IndexedOrder(
        weights=weights,
        told=told,
        calls=tuple(
            _call(stream, list(together), gathered_index, first_of_rank)
            for of_chunk in query_ranges(stream, len(share.layout), share.rank)
            for _, together in groupby(sorted(of_chunk, key=_kind), key=_kind)
        ),
    )


def _kind(run: QueryRange) -> tuple[bool, int]:
    return run.call(None)


def _call(stream: PackedStream, runs: list[QueryRange], place: Tensor, first_of_rank: int) -> IndexedCall:
    def column(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values))[:, None]

    starts, firsts, lasts = (column(v) for v in zip(*((r.segment.start, r.first, r.last) for r in runs), strict=True))
    own = firsts + torch.arange(int((lasts - firsts).max()))[None]
    real = own < lasts
    queries = torch.where(real, place[torch.where(real, starts + own, 0)] - first_of_rank, 0)
    source = real.flatten().nonzero().flatten()
    own_key = torch.arange(int(lasts.max()))[None]
    keys = torch.where(own_key < lasts, starts + own_key, 0)
    before = [stream.tokens_before(run.segment, run.segment.before) for run in runs]
    prefix = torch.nn.utils.rnn.pad_sequence(before, batch_first=True)
    return IndexedCall(
        queries=queries,
        keys=place[torch.cat([prefix, keys], dim=1)],
        prefix=torch.tensor([len(tokens) for tokens in before]),
        own=own.clamp(max=lasts - 1),
        real=real,
        source=source,
        target=queries.flatten()[source],
        width=prefix.shape[1],
        furthest=int(firsts.max()),
    )
