"""From prompts and responses to one token stream that a Megatron model can run, and back to responses.

A *unit* is one prompt with the responses to it. Its prompt is laid into the stream once, and so is what several responses begin
with (`prefix_tree.py`); each response attends to the tokens before its own, at the positions it would have alone, so the result
is that of running prompt + response separately while what sequences share is computed a single time. The last token of a
response predicts nothing and is left out, unless a role (a reward model) scores at the tokens themselves. Pure tensor code, one
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.data.answers import Answers
from megarl.data.columns import unknown
from megarl.data.media import Media
from megarl.data.prefix_tree import Node, common_prefixes, prefix_tree
from megarl.option_list import part

SCORED_IDS = "scored_ids"
"""The column `[N, k]` of ids, as floats, whose log-probs a log-prob head gives beside that of the sampled token."""
FILLS = "fills"
"""The column of tokens, 1 each, of responses that only fill a batch up and count nowhere."""


class TopK(NamedTuple):
    """The `k` likeliest tokens of each row among the ids below `vocabulary`."""

    k: int
    vocabulary: int


class ScorePosition(Enum):
    """The position at which a model's output for a token of a response is taken."""

    NEXT = "at the token before, which predicts it (log-probs, values)"
    AT = "at the token itself, after it has been read (reward models)"

    @classmethod
    def of(cls, at: Tensor | None) -> ScorePosition:
        """`AT` where a mask says at which tokens."""
        return cls.NEXT if at is None else cls.AT


@dataclass
class Response:
    """One response of a unit.

    `index` is its row in the global batch: results come back under it. `token_ids` is int64 `[L]`, `mask` bool `[L]`
    (True where the policy sampled the token; only these get log-probs and loss). `columns` holds float `[L]` or
    `[L, k]` tensors by name (advantages, old log-probs, loss weights …). `media` are the pictures told between its turns, their
    places counted from its first token. `positions` int64 `[3, L]` or `[L]` are those of its tokens; None: they follow the
    prompt's one by one. `extra` `[L, ...]` are the token columns of options by name (`data/columns.py`).
    """

    index: int
    token_ids: Tensor
    mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    media: tuple[Media, ...] = ()
    positions: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Unit:
    """A prompt (`prompt_ids` int64 `[P]`) and the responses computed with it.

    `media` are the pictures in it. `positions` int64 `[3, P]` are those of its tokens in time, height and width, or `[P]`,
    which responses continue behind the largest if they have none of their own; None: each token's is its place. `extra`
    `[P, ...]` are the token columns of options.
    """

    prompt_ids: Tensor
    responses: list[Response]
    media: tuple[Media, ...] = ()
    positions: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)


MicroBatch = list[Unit]


@dataclass(frozen=True)
class Segment:
    """A run of the stream that attends causally to itself and fully to the segments of its `path`, which have `before` tokens.

    `path` are their numbers, the first of a sequence first. Padding may follow its `length` tokens, up to the stream's next
    boundary; no other token attends to it.
    """

    start: int
    length: int
    path: tuple[int, ...] = ()
    before: int = 0


class LaidResponse(NamedTuple):
    """The places of a response's fed tokens in a stream: int64 `[P + n]` places, the prompt's P first."""

    prompt_length: int
    places: Tensor


@dataclass
class PackedStream:
    """A micro-batch as one stream of S tokens.

    `token_ids`: int64 `[S]`. `position_ids`: int64 `[S]`, or `[3, S]` where any token has positions on three axes.
    `segments` say who attends to whom. `boundaries` are the starts of the
    segments, that of the padding after the last one if there is any, and S. `rows`, `targets`: int64 `[N]`, the
    stream position whose hidden state predicts each scored token, and that token. `owners` lists (response index,
    int64 `[n]` places in the response, n) in the order of `rows`; `response` int64 `[N]` is whose each row is, by its number in
    `owners`, and `lengths` int64 `[R]` how many rows each owner has. `columns`: float `[N]` or `[N, k]`, aligned with `rows`.
    `parts`: the numbers of the segments that make up each owner's sequence, the first of it first. `media` are the pictures and
    which of the tokens show them, as the option pictures lays them; None: there are none. `laid` says where each owner lies.
    `extra` `[S, ...]` are the token columns of options by name, unknown on padding.
    """

    token_ids: Tensor
    position_ids: Tensor
    segments: list[Segment]
    boundaries: list[int]
    rows: Tensor
    targets: Tensor
    owners: list[tuple[int, Tensor, int]]
    response: Tensor
    lengths: Tensor
    columns: dict[str, Tensor]
    parts: list[tuple[int, ...]]
    media: Any = None
    laid: list[LaidResponse] = field(default_factory=list)
    extra: dict[str, Tensor] = field(default_factory=dict)

    def tokens_before(self, segment: Segment, most: int) -> Tensor:
        """int64: the places of the last tokens, at most `most`, before `segment` in its sequences."""
        places: list[Tensor] = []
        for number in reversed(segment.path if most > 0 else ()):
            above = self.segments[number]
            end = above.start + above.length
            places.insert(0, torch.arange(max(above.start, end - most), end))
            most -= above.length
            if most <= 0:
                break
        return torch.cat([torch.zeros(0, dtype=torch.long), *places])

    def to(self, device: torch.device) -> PackedStream:
        """The same stream with its tensors on `device`, but for token columns, of which layers take what is theirs."""
        names = ("token_ids", "position_ids", "rows", "targets", "response", "lengths")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return replace(self, **moved, columns=columns)

    def answers(self, values: Tensor) -> Answers:
        """Per-token `values` `[N, C]` by response, zero where the mask is."""
        lengths = np.array([length for _, _, length in self.owners], dtype=np.int64)
        starts = (np.cumsum(lengths) - lengths).tolist()
        places = torch.cat([start + positions for start, (_, positions, _) in zip(starts, self.owners, strict=True)])
        full = torch.zeros(values.shape[1], int(lengths.sum()))
        full[:, places] = values.detach().float().cpu().T
        return Answers(np.array([index for index, _, _ in self.owners], dtype=np.int64), lengths, full.numpy())


@dataclass(frozen=True)
class ScoredValues:
    """Values `[N]` or `[N, k]` of a stream's scored tokens, wherever they are, of responses with an index below `before`."""

    stream: PackedStream
    values: Tensor
    before: int


@dataclass(frozen=True)
class StreamShard:
    """The part of a stream that one rank of a context-parallel group holds.

    `layout` int64 `[cp, S/cp]`: the stream positions of every rank's tokens, in each rank's order; `rank` is whose share this
    is. `rows`, `scored` int64 `[n]`: the places among this rank's tokens that predict a scored token, and which of the
    stream's N scored tokens that is.
    """

    layout: Tensor
    rank: int
    rows: Tensor
    scored: Tensor

    @property
    def positions(self) -> Tensor:
        """int64 `[S/cp]`: the stream positions of this rank's tokens."""
        return self.layout[self.rank]

    def to(self, device: torch.device) -> StreamShard:
        """The same share with its tensors on `device`."""
        return StreamShard(self.layout.to(device), self.rank, self.rows.to(device), self.scored.to(device))


def zigzag(boundaries: Sequence[int], cp: int) -> Tensor:
    """Stream positions of each context-parallel rank's tokens, int64 `[cp, S/cp]`.

    Each run between two `boundaries`, whose length is a multiple of 2·cp unless cp is 1, is cut into 2·cp equal chunks, and
    rank r holds chunks r and 2·cp - 1 - r of it: under causal attention every rank has the same work. This is the
    split that Transformer Engine and megarl's rotary embeddings assume for packed sequences.
    """
    if cp == 1:
        return torch.arange(boundaries[-1])[None]
    ranks = torch.arange(cp)
    chunks = torch.stack([ranks, 2 * cp - 1 - ranks], dim=1)
    runs = [torch.arange(start, end).view(2 * cp, -1) for start, end in pairwise(boundaries)]
    return torch.cat([run[chunks].flatten(1) for run in runs], dim=1)


def context_parallel_shard(stream: PackedStream, cp: int, rank: int) -> StreamShard:
    """The part of `stream` that context-parallel rank `rank` of `cp` holds, which was packed with segments of multiples
    of 2·cp."""
    layout = zigzag(stream.boundaries, cp)
    index_of = torch.full((len(stream.token_ids),), -1)
    index_of[layout[rank]] = torch.arange(layout.shape[1])
    rows = index_of[stream.rows]
    scored = (rows >= 0).nonzero().flatten()
    return StreamShard(layout, rank, rows[scored], scored)


def split_shared_prompts(units: Sequence[Unit]) -> MicroBatch:
    """The same responses, each in a unit of its own with a copy of its prompt."""
    return [replace(unit, responses=[response]) for unit in units for response in unit.responses]


class _StreamBuilder:
    """A stream being laid: `length` tokens so far; the last segment, its padding included, ends at `end`."""

    def __init__(self, segment_multiple: int) -> None:
        self.segment_multiple = segment_multiple
        self.tokens: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.segments: list[Segment] = []
        self._extra: dict[str, list[tuple[int, Tensor]]] = {}
        self.length = self.end = 0

    def append(self, tokens: Tensor, positions: Tensor, parent: int = -1) -> int:
        """Lay `tokens`, if any, at `positions` (`[n]` or `[3, n]`) as one segment behind the segment `parent`, and pad it.

        Returns the number of the segment that they end with.
        """
        if not len(tokens):
            return parent
        path: tuple[int, ...] = ()
        before = 0
        if parent >= 0:
            above = self.segments[parent]
            path, before = (*above.path, parent), above.before + above.length
        self.segments.append(Segment(self.length, len(tokens), path, before))
        self._add(tokens, positions)
        self.pad_to(self.segment_multiple)
        self.end = self.length
        return len(self.segments) - 1

    def pad_to(self, multiple: int) -> None:
        """Round the length up to `multiple`."""
        padding = torch.zeros(-self.length % multiple, dtype=torch.long)
        self._add(padding, padding)

    def lay_extra(self, start: int, extra: Mapping[str, Tensor], tokens: int) -> None:
        """Have the first `tokens` of token columns stand from `start` on."""
        for name, values in extra.items() if tokens else ():
            self._extra.setdefault(name, []).append((start, values[:tokens]))

    def extra(self) -> dict[str, Tensor]:
        """`[S, ...]` by name of what was laid, unknown elsewhere."""
        columns: dict[str, Tensor] = {}
        for name, pieces in self._extra.items():
            some = pieces[0][1]
            laid = columns[name] = some.new_full((self.length, *some.shape[1:]), unknown(some[:0].numpy().dtype))
            for start, values in pieces:
                laid[start : start + len(values)] = values
        return columns

    def position_ids(self) -> Tensor:
        """`[S]`, or `[3, S]` if any of the tokens has a position on each axis."""
        return _joined(self.positions)

    def _add(self, tokens: Tensor, positions: Tensor) -> None:
        self.tokens.append(tokens)
        self.positions.append(positions)
        self.length += len(tokens)


def _joined(positions: Sequence[Tensor]) -> Tensor:
    """`[n]` and `[3, n]` behind each other: `[n]` where all are, else `[3, n]`."""
    if any(part.dim() == 2 for part in positions):
        return torch.cat([part.expand(3, -1) for part in positions], dim=1)
    return torch.cat([*positions])


def _positions(unit: Unit) -> tuple[Tensor, int]:
    """Positions of a prompt's tokens, and the position that a response begins with."""
    length = len(unit.prompt_ids)
    if unit.positions is None:
        return torch.arange(length), length
    _check_positions(unit.positions, "prompt", length)
    return unit.positions, int(unit.positions.max()) + 1


def _positions_behind(first: int, response: Response, fed: int) -> Tensor:
    """`[fed]` or `[3, fed]`: those of a response's first `fed` tokens, the prompt's ending before `first`."""
    if response.positions is None:
        if response.media:
            raise ValueError(f"response {response.index} shows pictures, but has no positions")
        return torch.arange(first, first + fed)
    _check_positions(response.positions, "response", len(response.token_ids))
    if any(shown.place + shown.tokens > fed for shown in response.media):
        raise ValueError(f"response {response.index} ends with a picture; its last token must be one that was sampled")
    return response.positions[..., :fed]


def _check_positions(positions: Tensor, what: str, length: int) -> None:
    if positions.shape not in ((3, length), (length,)):
        allowed = f"[3, {length}] or [{length}]"
        raise ValueError(f"a {what} of {length} tokens has positions {list(positions.shape)}; they must be {allowed}")


def _fed(response: Response, position: ScorePosition) -> int:
    """Tokens of a response that are laid into the stream."""
    length = len(response.token_ids)
    return length if position is ScorePosition.AT else max(length - 1, 0)


def _shareable(response: Response, first: int, *, share_turns: bool) -> npt.NDArray[np.int64]:
    """The tokens of a response that others may compute with it, behind a prompt whose positions end before `first`.

    A token is shared with those before it: none that has token columns, which are each response's own, or without
    `share_turns`, none from a picture on, and never the last one, which may not be fed.
    """
    count = max(len(response.token_ids) - 1, 0) if share_turns and not response.extra else 0
    count = min([count, *(media.place for media in response.media)])
    if response.positions is not None:
        follows = (torch.atleast_2d(response.positions)[:, :count] == torch.arange(first, first + count)).all(0)
        count = int(follows.long().cumprod(0).sum())
    return response.token_ids[:count].numpy()


def _tree_of(unit: Unit, first: int, position: ScorePosition, *, share_turns: bool) -> tuple[list[Node], list[int], bool]:
    """The tree of a unit's responses and where each ends (see `prefix_tree`); whether all go on alike behind the prompt.

    The prompt is then laid together with what they have in common.
    """
    prefixes = common_prefixes([_shareable(response, first, share_turns=share_turns) for response in unit.responses])
    nodes, ends = prefix_tree(prefixes, [_fed(response, position) for response in unit.responses])
    return nodes, ends, sum(node.parent < 0 for node in nodes) == 1 and -1 not in ends


def laid_tokens(
    units: Sequence[Unit],
    *,
    pad_to_multiple: int = 1,
    segment_multiple: int = 1,
    share_turns: bool = True,
    position: ScorePosition = ScorePosition.NEXT,
) -> int:
    """S of the stream that `pack` would lay of the same arguments."""
    total = 0
    for unit in units:
        nodes, _, alike = _tree_of(unit, _positions(unit)[1], position, share_turns=share_turns)
        lengths, prompt = [node.end - node.start for node in nodes], len(unit.prompt_ids)
        lengths = [prompt + lengths[0], *lengths[1:]] if alike else [prompt, *lengths]
        total += sum(length + -length % segment_multiple for length in lengths)
    return total + -total % pad_to_multiple


def _lay_unit(laid: _StreamBuilder, unit: Unit, position: ScorePosition, *, share_turns: bool) -> list[int]:
    """Lay a unit; the segments that its responses end with."""
    of_prompt, first = _positions(unit)
    follow = [_positions_behind(first, response, _fed(response, position)) for response in unit.responses]
    nodes, ends, alike = _tree_of(unit, first, position, share_turns=share_turns)
    prompt = -1 if alike else laid.append(unit.prompt_ids, of_prompt)
    segments: list[int] = []
    for node in nodes:
        part = slice(node.start, node.end)
        tokens, positions = unit.responses[node.member].token_ids[part], follow[node.member][..., part]
        if node.parent < 0 and alike:
            tokens, positions = torch.cat([unit.prompt_ids, tokens]), _joined([of_prompt, positions])
        segments.append(laid.append(tokens, positions, segments[node.parent] if node.parent >= 0 else prompt))
    return [segments[end] if end >= 0 else prompt for end in ends]


def pack(
    units: Sequence[Unit],
    *,
    pad_to_multiple: int = 1,
    segment_multiple: int = 1,
    share_turns: bool = True,
    position: ScorePosition = ScorePosition.NEXT,
) -> PackedStream:
    """Lay `units` into one stream.

    Args:
        units: prompts with their responses; prompts have at least one token.
        pad_to_multiple: S is rounded up to a multiple of this (sequence parallelism splits the stream evenly).
        segment_multiple: every segment is padded at its end to a multiple of this; it divides `pad_to_multiple` (context
            parallelism splits each segment, see `zigzag`).
        share_turns: lay what several responses begin with once; else they share their prompt alone.
        position: of a response's scores.
    """
    laid = _StreamBuilder(segment_multiple)
    rows: list[Tensor] = []
    targets: list[Tensor] = []
    owners: list[tuple[int, Tensor, int]] = []
    columns: dict[str, list[Tensor]] = {}
    shown: list[tuple[Media, int]] = []
    places_of: list[LaidResponse] = []
    parts: list[tuple[int, ...]] = []
    for unit in units:
        prompt_start, prompt_length = laid.length, len(unit.prompt_ids)
        ends = _lay_unit(laid, unit, position, share_turns=share_turns)
        shown += ((media, prompt_start) for media in unit.media)
        laid.lay_extra(prompt_start, unit.extra, prompt_length)
        for response, end in zip(unit.responses, ends, strict=True):
            length, places = len(response.token_ids), response.mask.nonzero().flatten()
            path = (*laid.segments[end].path, end)
            fed = prompt_length + _fed(response, position)
            at = torch.cat([torch.arange(s.start, s.start + s.length) for s in map(laid.segments.__getitem__, path)])[:fed]
            # A picture's tokens, and token columns, are no other response's: they lie behind each other.
            shown += ((media, int(at[prompt_length + media.place]) - media.place) for media in response.media)
            if fed > prompt_length:
                laid.lay_extra(int(at[prompt_length]), response.extra, fed - prompt_length)
            places_of.append(LaidResponse(prompt_length, at))
            rows.append(at[prompt_length + places - int(position is ScorePosition.NEXT)])
            targets.append(response.token_ids[places])
            owners.append((response.index, places, length))
            parts.append(path)
            for name, column in response.columns.items():
                columns.setdefault(name, []).append(column[places])
    laid.pad_to(pad_to_multiple)
    lengths = torch.tensor([len(places) for _, places, _ in owners])
    boundaries = [segment.start for segment in laid.segments] + [laid.end]
    return PackedStream(
        torch.cat(laid.tokens),
        laid.position_ids(),
        laid.segments,
        boundaries if laid.end == laid.length else [*boundaries, laid.length],
        torch.cat(rows),
        torch.cat(targets),
        owners,
        torch.repeat_interleave(torch.arange(len(owners)), lengths),
        lengths,
        {name: torch.cat(of_responses) for name, of_responses in columns.items()},
        parts,
        part("pictures", "stream_media", "a prompt with media").laid_media(shown) if shown else None,
        places_of,
        laid.extra(),
    )
