"""The sequences that a stream's tokens belong to: a prompt that several responses share belongs to each of theirs.

Statistics over tokens count a token once for each of its sequences, and padding not at all: they then do not depend on how
prompts are shared, packed and padded. Pure tensor code, one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.data.stream import FILLS, PackedStream


@dataclass(frozen=True)
class TokenSequences:
    """The sequences (prompt and response) of a stream with G segments and R responses.

    `segment` int64 `[T]`: the segment of each token that is held here, G for padding. `members` float32 `[R, G]`: 1 where a
    segment is part of a response's sequence. `lengths` float32 `[R]`: tokens of a sequence that are fed; 0 where a row of
    `members` is empty, as that of a response which only fills the stream.
    """

    segment: Tensor
    members: Tensor
    lengths: Tensor

    @property
    def weights(self) -> Tensor:
        """float32 `[G + 1]`: how many sequences the tokens of each segment belong to; the last are padding."""
        return torch.nn.functional.pad(self.members.sum(0), (0, 1))

    def held(self, positions: Tensor) -> TokenSequences:
        """Restrict to the tokens at these places; the sequences stay whole."""
        return TokenSequences(self.segment[positions], self.members, self.lengths)

    def to(self, device: torch.device) -> TokenSequences:
        """The same on `device`."""
        return TokenSequences(self.segment.to(device), self.members.to(device), self.lengths.to(device))


def token_sequences(stream: PackedStream) -> TokenSequences:
    """The sequences of all tokens of a stream that is in main memory; responses with a negative index, and those that the
    column `FILLS` names, fill it and are no sequence."""
    segments = stream.segments
    fills = {*stream.response[stream.columns[FILLS] != 0].tolist()} if FILLS in stream.columns else set[int]()
    owner = torch.full((len(stream.token_ids),), len(segments))
    for number, segment in enumerate(segments):
        owner[segment.start : segment.start + segment.length] = number
    members = torch.zeros(len(stream.parts), len(segments))
    for row, ((index, _, _), parts) in enumerate(zip(stream.owners, stream.parts, strict=True)):
        if index >= 0 and row not in fills:
            members[row, list(parts)] = 1
    return TokenSequences(owner, members, members @ torch.tensor([float(segment.length) for segment in segments]))
