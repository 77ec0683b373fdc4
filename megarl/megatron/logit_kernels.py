"""The passes of `logit_passes.py` as Triton kernels: a program has a row and goes through it in tiles.

Logits are read in their own type and computed with in float32. Nothing but `[n]` numbers is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from megarl.megatron.row_gradients import RowGradients

TILE = 4096
"""Logits of a row that a program holds at once, at most."""
WARPS = 8


@triton.jit
def row_sums_kernel(logits, found, row_stride, real, rows, temperature, SQUARES: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One read of a row: the sums so far are rescaled whenever a tile has a larger logit."""
    row = tl.program_id(0).to(tl.int64)
    of_row = logits + row * row_stride
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    squared = tl.zeros((), tl.float32)
    for start in range(0, real, TILE):
        columns = start + tl.arange(0, TILE)
        is_real = columns < real
        x = tl.load(of_row + columns, mask=is_real, other=float("-inf")).to(tl.float32) / temperature
        highest = tl.maximum(peak, tl.max(x, 0))
        shift = tl.where(total > 0, peak - highest, 0.0)  # at first the peak is -inf, and the sums are 0
        factor = tl.exp(shift)
        weighted = factor * (weighted + shift * total)
        total = factor * total
        below = tl.where(is_real, x - highest, 0.0)
        exponentials = tl.where(is_real, tl.exp(below), 0.0)
        total += tl.sum(exponentials, 0)
        weighted += tl.sum(exponentials * below, 0)
        if SQUARES:
            squared = squared * factor * factor + tl.sum(exponentials * exponentials, 0)
        peak = highest
    tl.store(found + row, peak)
    tl.store(found + rows + row, total)
    tl.store(found + 2 * rows + row, weighted)
    if SQUARES:
        tl.store(found + 3 * rows + row, squared)


@triton.jit
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits, per_row, targets, at_targets, row_stride, width, real, rows, count, temperature, TILE: tl.constexpr
):
    """One read and one write of a tile. `per_row` `[4, n]`: log Z, entropy, and the gradients of entropy and of all log-probs;
    `targets` and `at_targets` `[n, count]`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    places = logits + row * row_stride + columns
    is_real = columns < real
    log_z = tl.load(per_row + row)
    entropy = tl.load(per_row + rows + row)
    of_entropy = tl.load(per_row + 2 * rows + row)
    of_all = tl.load(per_row + 3 * rows + row)
    log_p = tl.load(places, mask=is_real, other=0.0).to(tl.float32) / temperature - log_z
    gradient = -tl.exp(log_p) * ((log_p + entropy) * of_entropy + of_all)
    for number in range(count):
        target = tl.load(targets + row * count + number)
        target_gradient = tl.load(at_targets + row * count + number)
        gradient += tl.where(columns == target, target_gradient, 0.0)
    gradient = tl.where(is_real, gradient / temperature, 0.0)
    tl.store(places, gradient.to(logits.dtype.element_ty), mask=columns < width)


def row_sums_by_kernel(logits: Tensor, real: int, temperature: float, *, squares: bool) -> Tensor:
    """Compute what `logit_passes.row_sums` does, by a kernel."""
    rows = len(logits)
    sums = torch.empty(4 if squares else 3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _launch(row_sums_kernel, (rows,), logits, sums, logits.stride(0), real, rows, float(temperature), SQUARES=squares)
    return sums


def gradient_by_kernel(logits: Tensor, real: int, temperature: float, given: RowGradients) -> Tensor:
    """Compute what `logit_passes.logits_to_gradient` does, by a kernel."""
    rows, width = logits.shape
    per_row = torch.stack([given.log_z, given.entropy, given.of_entropy, given.of_log_probs.sum(1)])
    at_targets = (given.of_log_probs * given.here).contiguous()
    targets = given.target.contiguous()
    if rows:
        arguments = (logits, per_row, targets, at_targets, logits.stride(0), width, real, rows, targets.shape[1])
        _launch(gradient_kernel, (rows, triton.cdiv(width, TILE)), *arguments, float(temperature))
    return logits


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    kernel[grid](*arguments, **constants, TILE=TILE, num_warps=WARPS)
