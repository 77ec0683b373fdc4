"""From prompts and responses to one token stream that a Megatron model can run, and back to responses.

A *unit* is one prompt with the responses to it. Its prompt is laid into the stream once, followed by its responses;
each response attends to the prompt and to itself, at the positions it would have alone, so the result is that of
running prompt + response separately while a group's prompt is computed a single time. The last token of a response
predicts nothing and is left out, unless a role (a reward model) scores at the tokens themselves. Pure tensor code, one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Response:
    """One response of a unit.

    `index` is its row in the global batch: results come back under it. `token_ids` is int64 `[L]`, `mask` bool `[L]`
    (True where the policy sampled the token; only these get log-probs and loss). `columns` holds float `[L]` tensors
    by name (advantages, old log-probs, loss weights …).
    """

    index: int
    token_ids: Tensor
    mask: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Unit:
    """A prompt (`prompt_ids` int64 `[P]`) and the responses computed with it."""

    prompt_ids: Tensor
    responses: list[Response]


MicroBatch = list[Unit]


@dataclass(frozen=True)
class Segment:
    """A run of the stream that attends causally to itself and fully to `prefix_length` tokens at `prefix_start`."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass
class PackedStream:
    """A micro-batch as one stream of S tokens.

    `token_ids`, `position_ids`: int64 `[S]`. `segments` say who attends to whom. `rows`, `targets`: int64 `[N]`, the
    stream position whose hidden state predicts each scored token, and that token. `owners` lists (response index,
    int64 `[n]` places in the response, n) in the order of `rows`. `columns`: float `[N]`, aligned with `rows`.
    """

    token_ids: Tensor
    position_ids: Tensor
    segments: list[Segment]
    rows: Tensor
    targets: Tensor
    owners: list[tuple[int, Tensor, int]]
    columns: dict[str, Tensor]

    def to(self, device: torch.device) -> PackedStream:
        """The same stream with its tensors on `device`."""
        return PackedStream(
            self.token_ids.to(device),
            self.position_ids.to(device),
            self.segments,
            self.rows.to(device),
            self.targets.to(device),
            self.owners,
            {name: column.to(device) for name, column in self.columns.items()},
        )

    def split(self, values: Tensor) -> dict[int, Tensor]:
        """Per-token `values` `[N]` as `{response index: [L]}` on the CPU, zero where the mask is."""
        split: dict[int, Tensor] = {}
        for (index, places, length), part in zip(
            self.owners, values.detach().float().cpu().split([len(p) for _, p, _ in self.owners]), strict=True
        ):
            full = torch.zeros(length)
            full[places] = part
            split[index] = full
        return split


def split_shared_prompts(units: Sequence[Unit]) -> MicroBatch:
    """The same responses, each in a unit of its own with a copy of its prompt."""
    return [Unit(unit.prompt_ids, [response]) for unit in units for response in unit.responses]


def pack(units: Sequence[Unit], *, pad_to_multiple: int = 1, score_at: bool = False) -> PackedStream:
    """Lay `units` into one stream.

    Args:
        units: prompts with their responses; prompts have at least one token.
        pad_to_multiple: S is rounded up to a multiple of this (sequence parallelism splits the stream evenly).
        score_at: score at each token in the mask, after it has been read, instead of before it (reward models).
    """
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    segments: list[Segment] = []
    rows: list[Tensor] = []
    targets: list[Tensor] = []
    owners: list[tuple[int, Tensor, int]] = []
    columns: dict[str, list[Tensor]] = {}
    at = 0
    for unit in units:
        prompt_length = len(unit.prompt_ids)
        prompt_start = at
        tokens.append(unit.prompt_ids)
        positions.append(torch.arange(prompt_length))
        at += prompt_length
        alone = len(unit.responses) == 1
        if not alone:
            segments.append(Segment(prompt_start, prompt_length))
        for response in unit.responses:
            length = len(response.token_ids)
            places = response.mask.nonzero().flatten()
            kept = length if score_at else max(length - 1, 0)
            tokens.append(response.token_ids[:kept])
            positions.append(torch.arange(prompt_length, prompt_length + kept))
            if alone:
                segments.append(Segment(prompt_start, prompt_length + kept))
            elif kept:
                segments.append(Segment(at, kept, prompt_start, prompt_length))
            before = torch.where(places == 0, prompt_start + prompt_length - 1, at + places - 1)
            rows.append(at + places if score_at else before)
            targets.append(response.token_ids[places])
            owners.append((response.index, places, length))
            for name, column in response.columns.items():
                columns.setdefault(name, []).append(column[places])
            at += kept
    padding = -at % pad_to_multiple
    tokens.append(torch.zeros(padding, dtype=torch.long))
    positions.append(torch.zeros(padding, dtype=torch.long))
    return PackedStream(
        torch.cat(tokens),
        torch.cat(positions),
        segments,
        torch.cat(rows),
        torch.cat(targets),
        owners,
        {name: torch.cat(parts) for name, parts in columns.items()},
    )
