"""The stream that a layer for multi-token prediction runs: each token beside what the decoder gives for the one before it.

The layer predicts a token from the two before it, so a sequence begins at its second token here, at position 0. Prompts stay
shared: what belongs to a token depends on tokens before it only. Pure tensor code, one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.data.stream import MicroBatch, PackedStream, Response, Unit, pack

_ROW = "row"
"""The column of the places in the decoder's stream whose hidden states predict the scored tokens."""


@dataclass(frozen=True)
class ShiftedStream:
    """A stream whose `rows` predict tokens that rows of the decoder's stream predict, too.

    `before` int64 `[S]`: the place in the decoder's stream of the token before each. `policy_rows` int64 `[M]`: of each row's
    token the place there that predicts it. A token behind a single one has no row: the layer needs two before it.
    """

    stream: PackedStream
    before: Tensor
    policy_rows: Tensor

    def to(self, device: torch.device) -> ShiftedStream:
        """The same on `device`."""
        return replace(
            self, stream=self.stream.to(device), before=self.before.to(device), policy_rows=self.policy_rows.to(device)
        )


def shifted(
    units: Sequence[Unit],
    stream: PackedStream,
    *,
    pad_to_multiple: int = 1,
    segment_multiple: int = 1,
    share_turns: bool = True,
) -> ShiftedStream:
    """The stream for the layer of the `units` that were packed as `stream`, laid with the same arguments as in `pack`.

    It has a token even if no response has two tokens before one of its own: ranks that share out experts wait for each other.
    """
    moved: MicroBatch = []
    origins: list[int] = []
    ends = torch.tensor([len(places) for _, places, _ in stream.owners]).cumsum(0).tolist()
    rows = [stream.rows[end - len(places) : end] for end, (_, places, _) in zip(ends, stream.owners, strict=True)]
    first = 0
    for unit in units:
        numbers = range(first, first + len(unit.responses))
        responses = [_with_rows(response, rows[number]) for response, number in zip(unit.responses, numbers, strict=True)]
        first += len(responses)
        if len(unit.prompt_ids) > 1:
            moved.append(Unit(unit.prompt_ids[1:], responses))
            origins += numbers
            continue
        for response, number in zip(responses, numbers, strict=True):  # the first token of each is its prompt now
            if len(response.token_ids) > 1:
                moved.append(Unit(response.token_ids[:1], [_behind_first(response)]))
                origins.append(number)
    if not moved:
        nothing = {_ROW: torch.zeros(1, dtype=torch.long)}
        moved.append(Unit(stream.token_ids[:1], [Response(-1, stream.token_ids[:1], torch.tensor([False]), nothing)]))
    laid = pack(moved, pad_to_multiple=pad_to_multiple, segment_multiple=segment_multiple, share_turns=share_turns)
    before = torch.zeros(len(laid.token_ids), dtype=torch.long)
    for laid_row, origin in zip(laid.laid, origins, strict=False):
        before[laid_row.places] = stream.laid[origin].places[: len(laid_row.places)]
    return ShiftedStream(laid, before, laid.columns[_ROW])


def _with_rows(response: Response, rows: Tensor) -> Response:
    of_tokens = torch.zeros(len(response.token_ids), dtype=torch.long)
    of_tokens[response.mask] = rows
    return Response(response.index, response.token_ids, response.mask, {_ROW: of_tokens})


def _behind_first(response: Response) -> Response:
    columns = {name: column[1:] for name, column in response.columns.items()}
    return Response(response.index, response.token_ids[1:], response.mask[1:], columns)
