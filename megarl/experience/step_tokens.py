"""Tokens that an optimizer step treats apart: which columns there are of them, and the tokens of older weights."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms import CHOICES, WHOLE, Shard
from megarl.config import Config
from megarl.config.algorithm import AlgorithmConfig
from megarl.data.batch import Batch
from megarl.data.stored_batch import StoredBatch

TOKEN_COLUMNS = ("chosen", "top_entropy", "nll_weights")
"""The columns that `token_choices.set_token_columns` makes, each where the config asks for it."""

READ_BY_CHOICES = ("rollout_log_probs", "old_log_probs", "old_entropy", "advantages")
"""The columns that it reads, where there are these."""


def makes_token_columns(config: Config) -> bool:
    """Return whether the config asks for any of `TOKEN_COLUMNS`."""
    algorithm = config.algorithm
    return algorithm.policy_loss in CHOICES or algorithm.entropy.top_share < 1 or bool(algorithm.positive_nll.coef)


def count_older_tokens(batch: Batch, version: int) -> dict[str, float]:
    """The metrics of `older_tokens` for a batch whose tokens may be elsewhere."""
    if not isinstance(batch, StoredBatch):
        return older_tokens(batch, version, mask=False)
    older = sum(tokens for sample in batch.samples for sampled_by, tokens in sample.versions if sampled_by < version)
    return {"rollout/older_tokens": float(older)}


def older_part(batch: Batch, shard: Shard, version: int) -> dict[str, float]:
    """`older_tokens` with their column, as a `RowWork`."""
    return older_tokens(batch, version, mask=True, shard=shard)


def kept_part(batch: Batch, shard: Shard, name: str) -> None:
    """Make the engine's log-probs those under the limits of sampling, by the column `name`, as a `RowWork`."""
    batch.columns["rollout_log_probs"] = batch.columns["rollout_log_probs"] - batch.columns[name]


def older_tokens(batch: Batch, version: int, *, mask: bool, shard: Shard = WHOLE) -> dict[str, float]:
    """Metrics of the tokens that weights before `version` sampled. `mask`: they get the column `older`, 1 where they are, and
    the losses leave them out. `shard`: the way to the rows of others, whose tokens count too."""
    older = torch.zeros(batch.mask.shape)
    for row, sample in enumerate(batch.samples):
        start = 0
        for sampled_by, tokens in sample.versions:
            older[row, start : start + tokens] = float(sampled_by < version)
            start += tokens
    older = older * batch.mask
    if mask:
        batch.columns["older"] = older
    return {"rollout/older_tokens": float(shard.total(older.count_nonzero()[None]))}


def loss_arguments(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """The `algorithm.policy_loss_args` that the loss itself takes; the choice of its tokens takes the others."""
    of_choice = {argument.name for argument in algorithm.loss_needs.choice}
    return {name: value for name, value in algorithm.policy_loss_args.items() if name not in of_choice}
