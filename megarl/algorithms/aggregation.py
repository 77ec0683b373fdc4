"""From token losses to one number: one weight per token, with the denominators of the whole optimizer step.

Because the denominators are in the weights, a loss is a plain sum, and its gradient does not depend on how the step is
split into micro-batches or over ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.shard import WHOLE, Shard
from megarl.errors import ConfigError, nearest

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def token_weights(mask: Tensor, mode: str, *, norm_length: int | None = None, shard: Shard = WHOLE) -> Tensor:
    """Weights `w` such that the loss of the optimizer step is `(w * per_token_loss).sum()` (docs/methods.md#aggregation).

    Args:
        mask: bool `[B, T]`, sampled tokens of responses of the optimizer step.
        mode: one of `AGGREGATIONS`.
        norm_length: the constant L, in tokens; used by `seq_mean_token_sum_norm` only.
        shard: the way to *all* responses of the optimizer step: every rank, every micro-batch.

    Returns:
        float32 `[B, T]`: those of `row_weights` in `mask`, 0 elsewhere.

    Raises:
        ConfigError: as `row_weights`.
    """
    of_rows = shard.own(row_weights(shard.rows(mask.sum(dim=1)), mode, norm_length=norm_length))
    return torch.where(mask, of_rows[:, None], 0)


def row_weights(counts: Tensor, mode: str, *, norm_length: int | None = None) -> Tensor:
    """The weight of each sampled token of a response, from numbers of tokens alone.

    With n_i sampled tokens in response i, N = Σ n_i and R the number of responses with n_i > 0, it is: `token_mean` 1/N;
    `seq_mean_token_mean` 1/(R·n_i); `seq_mean_token_sum` 1/R; `seq_mean_token_sum_norm` 1/(R·L).

    Args:
        counts: int `[B]`, n_i of *all* responses of the optimizer step.
        mode: one of `AGGREGATIONS`.
        norm_length: the constant L, in tokens; used by `seq_mean_token_sum_norm` only.

    Returns:
        float32 `[B]`; 0 for a response without sampled tokens.

    Raises:
        ConfigError: `mode` is unknown, or `seq_mean_token_sum_norm` has no L above 0.
    """
    if mode not in AGGREGATIONS:
        raise ConfigError(f"aggregation is '{mode}'; it must be one of {', '.join(AGGREGATIONS)}{nearest(mode, AGGREGATIONS)}")
    tokens = counts.double()
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
    return torch.where(tokens > 0, (1 / denominator).float(), 0)
