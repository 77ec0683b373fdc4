"""The order in which a recurrent layer runs over the tokens of a packed stream: runs of tokens, where they begin, what
they hand on.

A run is a segment of the stream. It begins from zeros or, where tokens are before it, from what the run of the last of these
ends with, so that the responses to a prompt share its states, and those of all that they have in common. The gradient of a
state that is handed on is the sum over those who got it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from megarl.data.stream import PackedStream, Segment, zigzag


@dataclass
class PaddedRuns:
    """Runs of similar length in one batched call: B runs filled up to T tokens.

    `runs` int64 `[B]` are their numbers in the stage, `tokens` int64 `[B, T]` places in the stream (0 where filled up), `real`
    bool `[B, T]`, `source` int64 `[M]` the places in the flat `[B * T]` result that hold real tokens, and `target` int64 `[M]`
    their places in the stream.
    """

    runs: Tensor
    tokens: Tensor
    real: Tensor
    source: Tensor
    target: Tensor


@dataclass
class Stage:
    """Runs that need no other run of the same stage.

    `tokens` int64 `[M]` are the places in the stream of all their tokens, run after run, and `boundaries` int64 `[R + 1]` where
    in these each begins and ends. `prefix` int64 `[R]` is the run of the stage before that hands its state to each; None: all
    begin from zeros. `padded` are the same runs for batched calls.
    """

    tokens: Tensor
    boundaries: Tensor
    prefix: Tensor | None
    padded: tuple[PaddedRuns, ...]


@dataclass
class Recurrence:
    """The order of a stream's tokens.

    `taps` int64 `[S, W]`: the tokens that a causal convolution of width W sees at each place, the oldest first; S where it
    would look before the beginning. `stages` are run one after another. `layout` int64 `[cp, S/cp]` is that of `StreamShard`.
    """

    taps: Tensor
    stages: tuple[Stage, ...]
    layout: Tensor


def recurrence_of(stream: PackedStream, width: int, cp: int = 1) -> Recurrence:
    """The order of `stream`'s tokens, which `cp` ranks share, for layers whose convolution is `width` wide; in main memory."""
    numbers: dict[int, list[int]] = {}
    for number, segment in enumerate(stream.segments):
        numbers.setdefault(len(segment.path), []).append(number)
    stages = []
    for depth, runs in sorted(numbers.items()):
        segments = [stream.segments[number] for number in runs]
        row_of = {number: run for run, number in enumerate(numbers.get(depth - 1, []))}
        stages.append(_stage(segments, torch.tensor([row_of[s.path[-1]] for s in segments]) if depth else None))
    return Recurrence(_taps(stream, width), tuple(stages), zigzag(stream.boundaries, cp))


def _taps(stream: PackedStream, width: int) -> Tensor:
    size = len(stream.token_ids)
    taps = torch.full((size, width), size)
    offsets = torch.arange(1 - width, 1)[None]
    for segment in stream.segments:
        # the path's last tokens, then the segment's own; size where there are fewer
        before = stream.tokens_before(segment, width - 1)
        missing = torch.full((width - 1 - len(before),), size)
        seen = torch.cat([missing, before, torch.arange(segment.start, segment.start + segment.length)])
        positions = torch.arange(segment.length)[:, None]
        taps[segment.start : segment.start + segment.length] = seen[positions + offsets + width - 1]
    return taps


def _stage(segments: Sequence[Segment], prefix: Tensor | None) -> Stage:
    tokens = [torch.arange(segment.start, segment.start + segment.length) for segment in segments]
    boundaries = torch.tensor([0, *accumulate(segment.length for segment in segments)], dtype=torch.int64)
    in_order = sorted(range(len(segments)), key=lambda run: segments[run].length)
    together = groupby(in_order, key=lambda run: segments[run].length.bit_length())
    return Stage(torch.cat(tokens), boundaries, prefix, tuple(_padded(runs, segments) for _, runs in together))


def _padded(numbers: Iterable[int], segments: Sequence[Segment]) -> PaddedRuns:
    runs = list(numbers)
    starts = torch.tensor([segments[run].start for run in runs])[:, None]
    lengths = torch.tensor([segments[run].length for run in runs])[:, None]
    offsets = torch.arange(int(lengths.max()))[None]
    real = offsets < lengths
    tokens = torch.where(real, starts + offsets, 0)
    source = real.flatten().nonzero().flatten()
    return PaddedRuns(torch.tensor(runs), tokens, real, source, tokens.flatten()[source])
