"""From token losses to one number: one weight per token, with the denominators of the whole optimizer step.

Because the denominators are in the weights, a loss is a plain sum, and its gradient does not depend on how the step is
split into micro-batches or over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.errors import ConfigError, nearest

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def token_weights(mask: Tensor, mode: str, *, norm_length: int | None = None) -> Tensor:
    """Weights `w` such that the loss of the optimizer step is `(w * per_token_loss).sum()` (docs/methods.md#aggregation).

    With n_i sampled tokens in response i, N = Σ n_i and R the number of responses with n_i > 0, a sampled token of
    response i weighs: `token_mean` 1/N; `seq_mean_token_mean` 1/(R·n_i); `seq_mean_token_sum` 1/R;
    `seq_mean_token_sum_norm` 1/(R·L). Every other token weighs 0.

    Args:
        mask: bool `[B, T]`, sampled tokens of *all* responses of the optimizer step: every rank, every micro-batch.
        mode: one of `AGGREGATIONS`.
        norm_length: the constant L, in tokens; used by `seq_mean_token_sum_norm` only.

    Returns:
        float32 `[B, T]`.

    Raises:
        ConfigError: `mode` is unknown, or `seq_mean_token_sum_norm` has no L above 0.
    """
    if mode not in AGGREGATIONS:
        raise ConfigError(f"aggregation is '{mode}'; it must be one of {', '.join(AGGREGATIONS)}{nearest(mode, AGGREGATIONS)}")
    tokens = mask.sum(dim=1, keepdim=True, dtype=torch.float64)
    responses = (tokens > 0).sum().to(torch.float64)
    if mode == "token_mean":
        denominator = tokens.sum()
    elif mode == "seq_mean_token_mean":
        denominator = responses * tokens
    elif mode == "seq_mean_token_sum":
        denominator = responses
    else:
        if norm_length is None or norm_length < 1:
            raise ConfigError(f"norm_length is {norm_length}, but aggregation '{mode}' needs a number of tokens above 0")
        denominator = responses * norm_length
    return torch.where(mask, (1 / denominator).float(), 0)
