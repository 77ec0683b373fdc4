"""Parts of the gradients of chosen values of a chunk of logits, row by row."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowGradients(NamedTuple):
    """Parts of the gradient of n rows' logits, float32 `[n]` each; the gradients of log-probs are `[n, M]`.

    `log_z` is the log of the sum of exponentials over the whole vocabulary. `target`, int64 `[n, M]`, are numbers in the slice;
    `here`, bool `[n, M]`: which targets are in it.
    """

    log_z: Tensor
    entropy: Tensor
    of_entropy: Tensor
    of_log_probs: Tensor
    target: Tensor
    here: Tensor
