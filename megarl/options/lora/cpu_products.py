"""Products of rows and adapters in SGLang's PyTorch backend, which has a CPU's: one for each set of adapters in a batch.

SGLang multiplies segment by segment, a segment being neighbouring requests of the same adapters, and reads its bounds from
tensors: 32 requests of 8 clients by turns cost it 15 times what this costs. For SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_CACHED = "rows_by_adapters"


@dataclass(frozen=True)
class _Group:
    """Rows `first` to `end`, sorted by adapters, which are in place `place`, of `rank` and `scale`."""

    place: int
    first: int
    end: int
    rank: int
    scale: float


@dataclass(frozen=True)
class _Rows:
    """A batch's rows by adapters; `order` sorts them. None: they are sorted."""

    order: Tensor | None
    groups: Sequence[_Group]

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
        is_sorted = bool((places[1:] >= places[:-1]).all())
        rows = _Rows(None if is_sorted else torch.argsort(places, stable=True), groups)
        setattr(info, _CACHED, rows)
    return rows


def times_a(inputs: Tensor, weights: Tensor, batch_info: Any, num_slices: int = 1) -> Tensor:
    """The inputs [n, in] times A, and scale, of their adapters, in `weights` [places, slices x rank, in].

    Gives [n, slices x rank], each adapter's in its first `slices x rank` columns; others are 0. As SGLang's `sgemm_lora_a_fwd`.
    """
    if not weights.numel():
        return inputs.new_zeros(inputs.shape[0], 0)
    rows = _rows_of(batch_info)
    of_adapters, found = rows.sorted(inputs), inputs.new_zeros(inputs.shape[0], weights.shape[1])
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
    of_adapters = rows.sorted(inputs)
    added = output if rows.order is None else output.new_zeros(len(rows.order), bounds[-1])
    for group in rows.groups:
        for number, (left, right) in enumerate(pairwise(bounds)):
            part = of_adapters[group.first : group.end, number * group.rank : (number + 1) * group.rank]
            added[group.first : group.end, left:right].addmm_(part, weights[group.place, left:right, : group.rank].T)
    if rows.order is not None:
        output[:, : bounds[-1]].index_add_(0, rows.order, added)
    return output


def install() -> None:
    """Have SGLang's backend of adapters multiply so."""
    from sglang.srt.lora.backend import torch_backend

    torch_backend.sgemm_lora_a_fwd, torch_backend.sgemm_lora_b_fwd = times_a, times_b
