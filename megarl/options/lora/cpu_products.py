"""Products of rows and adapters in SGLang's PyTorch backend, which has a CPU's: by adapters, or of all adapters in one.

SGLang multiplies segment by segment, a segment being neighbouring requests of the same adapters, and reads its bounds from
tensors, which costs most where each request brings one token and clients take turns. For SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_CACHED = "rows_by_adapters"
FEW_ROWS = 8
"""Rows of one set of adapters up to which a product of all sets pays; as many are added to the other sets, of zero effect."""


@dataclass(frozen=True)
class _Group:
    """Rows `first` to `end`, sorted by adapters, which are in place `place`, of `rank` and `scale`."""

    place: int
    first: int
    end: int
    rank: int
    scale: float


@dataclass(frozen=True)
class _Padded:
    """Rows in equal numbers for each of the places from `first` to `end`.

    `rows` [places x rows] says which of the batch's; `found_at` [n] where each of the batch's is among them. `scales`
    [places, 1, 1].
    """

    first: int
    end: int
    rank: int
    rows: Tensor
    found_at: Tensor
    scales: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Rows [n, k] of the batch, as [places, rows, k]."""
        return values.index_select(0, self.rows).view(self.end - self.first, -1, values.shape[1])

    def back(self, values: Tensor) -> Tensor:
        """The batch's rows [n, k] of [places, rows, k]."""
        return values.view(-1, values.shape[2]).index_select(0, self.found_at)


@dataclass(frozen=True)
class _Rows:
    """A batch's rows by adapters; `order` sorts them. None: they are sorted. `padded`: for one product, where that pays."""

    order: Tensor | None
    groups: Sequence[_Group]
    padded: _Padded | None

    def sorted(self, values: Tensor) -> Tensor:
        """Rows [n, ...] of the batch in the groups' order."""
        return values if self.order is None else values.index_select(0, self.order)


def _rows_of(info: Any) -> _Rows:
    """The rows of a batch, found once: every layer asks for them."""
    rows: _Rows | None = getattr(info, _CACHED, None)
    if rows is None:
        places = torch.repeat_interleave(info.weight_indices_cpu.long(), info.seg_lens_cpu.long())
        ranks, scales, groups, first = info.lora_ranks_cpu.tolist(), info.scalings_cpu.tolist(), [], 0
        for place, count in enumerate(torch.bincount(places).tolist()):
            if count and ranks[place]:
                groups.append(_Group(place, first, first + count, ranks[place], scales[place]))
            first += count
        order = torch.argsort(places, stable=True)
        is_sorted = bool((places[1:] >= places[:-1]).all())
        rows = _Rows(None if is_sorted else order, groups, _padded(order, groups))
        setattr(info, _CACHED, rows)
    return rows


def _padded(order: Tensor, groups: Sequence[_Group]) -> _Padded | None:
    if len(groups) < 2 or len({group.rank for group in groups}) > 1:
        return None
    first, end, most = groups[0].place, groups[-1].place + 1, max(group.end - group.first for group in groups)
    has_others = sum(group.end - group.first for group in groups) < len(order)
    if has_others or most > FEW_ROWS or (end - first) * most > 2 * len(order):
        return None
    rows, found_at = order.new_zeros(end - first, most), torch.empty_like(order)
    scales = torch.zeros(end - first, 1, 1)
    for group in groups:
        place, count = group.place - first, group.end - group.first
        rows[place, :count] = order[group.first : group.end]
        found_at[order[group.first : group.end]] = torch.arange(count) + place * most
        scales[place] = group.scale
    return _Padded(first, end, groups[0].rank, rows.view(-1), found_at, scales)


def times_a(inputs: Tensor, weights: Tensor, batch_info: Any, num_slices: int = 1) -> Tensor:
    """The inputs [n, in] times A, and scale, of their adapters, in `weights` [places, slices x rank, in].

    Gives [n, slices x rank], each adapter's in its first `slices x rank` columns; others are 0. As SGLang's `sgemm_lora_a_fwd`.
    """
    if not weights.numel():
        return inputs.new_zeros(inputs.shape[0], 0)
    rows, found = _rows_of(batch_info), inputs.new_zeros(inputs.shape[0], weights.shape[1])
    if (padded := rows.padded) is not None and len(padded.found_at) == len(inputs):
        a = weights[padded.first : padded.end, : num_slices * padded.rank]
        of_places = torch.bmm(padded.of(inputs), a.transpose(1, 2)).mul_(padded.scales.to(inputs.dtype))
        found[:, : a.shape[1]] = padded.back(of_places)
        return found
    of_adapters = rows.sorted(inputs)
    for group in rows.groups:
        part = found[group.first : group.end, : num_slices * group.rank]
        a = weights[group.place, : num_slices * group.rank]
        torch.addmm(part, of_adapters[group.first : group.end], a.T, beta=0, alpha=group.scale, out=part)
    if rows.order is None:
        return found
    return torch.zeros_like(found).index_copy_(0, rows.order, found[: len(rows.order)])


def times_b(
    inputs: Tensor, weights: Tensor, batch_info: Any, slice_offsets: Tensor, base_output: Tensor | None = None
) -> Tensor:
    """`base_output` [n, out] plus `times_a`'s result times B of the rows' adapters, in `weights` [places, out, rank].

    Slice k has the columns from `slice_offsets[k]` to `slice_offsets[k + 1]`. It is added in place. As SGLang's
    `sgemm_lora_b_fwd`.
    """
    bounds = slice_offsets.tolist()
    output = base_output if base_output is not None else inputs.new_zeros(inputs.shape[0], bounds[-1])
    if not weights.numel():
        return output
    rows = _rows_of(batch_info)
    if (padded := rows.padded) is not None and len(padded.found_at) == len(inputs):
        of_places, rank = padded.of(inputs), padded.rank
        for number, (left, right) in enumerate(pairwise(bounds)):
            b = weights[padded.first : padded.end, left:right, :rank]
            part = of_places[:, :, number * rank : (number + 1) * rank]
            output[:, left:right] += padded.back(torch.bmm(part, b.transpose(1, 2)))
        return output
    of_adapters = rows.sorted(inputs)
    added = output if rows.order is None else output.new_zeros(len(rows.order), bounds[-1])
    for group in rows.groups:
        for number, (left, right) in enumerate(pairwise(bounds)):
            part = of_adapters[group.first : group.end, number * group.rank : (number + 1) * group.rank]
            added[group.first : group.end, left:right].addmm_(part, weights[group.place, left:right, : group.rank].T)
    if rows.order is not None:
        output[:, : bounds[-1]].index_add_(0, rows.order, added)
    return output
