"""The passes of the log-prob head over a chunk of logits besides products: sums over each row, and the logits' gradient.

Both read the chunk once and write it at most once. On GPUs they are Triton kernels (`logit_kernels.py`); elsewhere blocks of
rows that stay in the processor's caches. The arithmetic is float32, whatever the type of the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.megatron.row_gradients import RowGradients

BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 128 * 2**20}
"""By type of device, bytes of float32 that a block of rows has at most (one row, if that has more)."""


def row_sums(logits: Tensor, real: int, temperature: float, *, squares: bool = False) -> Tensor:
    """float32 `[3 (+ 1), n]` of `logits` `[n, W]`, each divided by `temperature`; those from `real` on are padding.

    The largest logit of a row, m (−∞ if all are padding), then Σ e^(x − m), Σ e^(x − m)(x − m), and with `squares`
    Σ e^(2(x − m)).
    """
    if logits.device.type == "cuda" and _has_triton():
        from megarl.megatron.logit_kernels import row_sums_by_kernel

        return row_sums_by_kernel(logits, real, temperature, squares=squares)
    sums = torch.zeros(4 if squares else 3, len(logits), dtype=torch.float32, device=logits.device)
    if not real:
        sums[0] = -torch.inf
        return sums
    for rows in _blocks(logits, real):
        _sums_of_block(logits[rows, :real], temperature, sums[:, rows])
    return sums


def _sums_of_block(logits: Tensor, temperature: float, found: Tensor) -> None:
    block = _scaled(logits, temperature)
    found[0] = peak = block.amax(1)
    block = _minus(block, peak, logits)
    exponentials = block.exp()
    found[1] = exponentials.sum(1)
    if len(found) == 4:
        found[3] = torch.linalg.vector_norm(exponentials, dim=1).square()
    found[2] = block.mul_(exponentials).sum(1)


def logits_to_gradient(logits: Tensor, real: int, temperature: float, given: RowGradients) -> Tensor:
    """Write the gradient of `logits` `[n, W]` in their place, and return it; that of padding is 0.

    d log_prob / d logit_j = 1[j = target] − p_j; d entropy / d logit_j = −p_j (log p_j + entropy).
    """
    if logits.device.type == "cuda" and _has_triton():
        from megarl.megatron.logit_kernels import gradient_by_kernel

        return gradient_by_kernel(logits, real, temperature, given)
    at_targets, of_all = given.of_log_probs * given.here, given.of_log_probs.sum(1)
    if real:
        for rows in _blocks(logits, real):
            of_block = RowGradients(*(part[rows] for part in given))
            _gradient_of_block(logits[rows, :real], temperature, of_block, at_targets[rows], of_all[rows])
    logits[:, real:] = 0.0
    return logits


def _gradient_of_block(logits: Tensor, temperature: float, given: RowGradients, at_targets: Tensor, of_all: Tensor) -> None:
    log_p = _minus(_scaled(logits, temperature), given.log_z, logits)
    p = log_p.exp()
    p.mul_(log_p.add_(given.entropy[:, None]).mul_(given.of_entropy[:, None]).add_(of_all[:, None])).neg_()
    p.scatter_add_(1, given.target.clamp(max=logits.shape[1] - 1), at_targets)
    logits.copy_(p if temperature == 1.0 else p.div_(temperature))


def _has_triton() -> bool:
    """torch's builds for CUDA come with it, but for those of some platforms."""
    return torch.utils._triton.has_triton_package()


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """float32; `logits` themselves if nothing is to be done."""
    block = logits.float()
    if temperature == 1.0:
        return block
    return block / temperature if block is logits else block.div_(temperature)


def _minus(block: Tensor, of_row: Tensor, logits: Tensor) -> Tensor:
    """In place, unless `block` is the `logits`."""
    return block - of_row[:, None] if block is logits else block.sub_(of_row[:, None])


def _blocks(logits: Tensor, real: int) -> list[slice]:
    size = max(1, BLOCK_BYTES[logits.device.type] // (4 * max(1, real)))
    return [slice(start, min(start + size, len(logits))) for start in range(0, len(logits), size)]
