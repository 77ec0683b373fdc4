"""Pairs in a stream: which responses are the sides of a pair, and what was summed over each response's tokens."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.preference import PREFERENCE_LOSSES, PreferenceSettings
from megarl.data.stream import PackedStream


def per_response(values: Tensor, stream: PackedStream) -> Tensor:
    """Sums of per-token `values` `[N]` over each response of the stream, `[R]` in the order of its owners."""
    return values.new_zeros(len(stream.owners)).index_add(0, stream.response, values)


def sides(stream: PackedStream) -> tuple[Tensor, Tensor]:
    """Places (int64 `[P]` each) of the chosen and of the rejected responses among the owners, paired by the column `pair`.

    Every pair has both sides in the stream: picking by a mask would ask the device how many there are.
    """
    pair, is_chosen = first_of_each(stream.columns["pair"], stream), first_of_each(stream.columns["is_chosen"], stream)
    order = (2 * pair.long() + (1 - is_chosen.long())).argsort()
    return order[0::2], order[1::2]


def pair_losses(
    name: str,
    both: tuple[Tensor, Tensor],
    own: Tensor,
    reference: Tensor,
    tokens: Tensor,
    settings: PreferenceSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute what the preference loss `name` answers to the pairs of `both` `sides`; the others are log-probs and
    lengths `[R]`."""
    chosen, rejected = both
    return PREFERENCE_LOSSES.resolve(name)(
        own[chosen],
        own[rejected],
        reference[chosen],
        reference[rejected],
        chosen_tokens=tokens[chosen],
        rejected_tokens=tokens[rejected],
        settings=settings,
    )


def first_of_each(column: Tensor, stream: PackedStream) -> Tensor:
    """The value of each response's first scored token, `[R]`; every response has one."""
    return column[stream.lengths.cumsum(0) - stream.lengths]
