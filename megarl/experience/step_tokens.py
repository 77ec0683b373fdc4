"""Tokens that an optimizer step treats apart: columns that are made over the whole step, before its backward passes, where the
tokens of some of its rows are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from megarl.algorithms import CHOICES, WHOLE, Shard, token_weights, top_entropies
from megarl.config import Config
from megarl.config.algorithm import AlgorithmConfig
from megarl.data.batch import Batch
from megarl.data.stored_batch import StoredBatch

TOKEN_COLUMNS = ("chosen", "top_entropy", "nll_weights")
"""The columns that `set_token_columns` makes, each where the config asks for it."""

READ_BY_CHOICES = ("rollout_log_probs", "old_log_probs", "old_entropy", "advantages")
"""The columns that it reads, where there are these."""


def set_token_columns(
    batch: Batch,
    rows: Sequence[int],
    config: Config,
    *,
    rewards: Sequence[float],
    update_number: int,
    shard: Shard = WHOLE,
) -> None:
    """Set the columns `TOKEN_COLUMNS` of one optimizer step over `rows`; those of other rows are 0.

    `chosen`: 1 at the tokens that the policy loss treats apart, by log-probs from before the step (with the correction `bypass`
    the engine's). `top_entropy`: 1 at the tokens whose policy loss counts. `nll_weights`: 1/n at the n tokens of right
    responses.

    Args:
        batch: with `advantages`, and `old_log_probs` or `old_entropy` where they are read.
        rows: those of the optimizer step.
        config: the run's.
        rewards: one per row of the batch, unshaped.
        update_number: optimizer steps of the run before this one. With the run's seed and the id of a sample it makes the
            sample's draw: the same in every layout and order of rows, and after a resume.
        shard: the way to the rows of others, where `batch` has some rows of the step's batch; `rows` and `rewards` are theirs.
    """
    algorithm, columns = config.algorithm, batch.columns
    mask = torch.zeros_like(batch.mask)
    mask[list(rows)] = batch.mask[list(rows)]
    if algorithm.policy_loss in CHOICES:
        seeds = [crc32(f"{config.run.seed} {update_number} {sample.sample_id}".encode()) for sample in batch.samples]
        log_probs = columns["rollout_log_probs" if algorithm.bypasses_old_log_probs else "old_log_probs"]
        names = {argument.name for argument in algorithm.loss_needs.choice}
        arguments = {name: value for name, value in algorithm.policy_loss_args.items() if name in names}
        choose = CHOICES[algorithm.policy_loss]
        columns["chosen"] = choose(log_probs, columns["advantages"], mask, seeds, shard, **arguments).float()
    if algorithm.entropy.top_share < 1:
        columns["top_entropy"] = top_entropies(columns["old_entropy"], mask, algorithm.entropy.top_share, shard).float()
    if algorithm.positive_nll.coef:
        is_right = torch.tensor(rewards, dtype=torch.float64) > algorithm.positive_nll.threshold
        columns["nll_weights"] = token_weights(mask & is_right[:, None], "token_mean", shard=shard)


def makes_token_columns(config: Config) -> bool:
    """Return whether `set_token_columns` makes any."""
    algorithm = config.algorithm
    return algorithm.policy_loss in CHOICES or algorithm.entropy.top_share < 1 or bool(algorithm.positive_nll.coef)


def token_columns_part(
    batch: Batch, shard: Shard, config: Config, update_number: int, rows: Sequence[int], rewards: Sequence[float]
) -> None:
    """`set_token_columns` as a `RowWork`."""
    set_token_columns(batch, rows, config, rewards=rewards, update_number=update_number, shard=shard)


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
