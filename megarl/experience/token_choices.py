"""The choice of the tokens that an optimizer step treats apart: columns that are made over the whole step, before its backward
passes, where the tokens of some of its rows are."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from megarl.algorithms import CHOICES, WHOLE, Shard, token_weights, top_entropies
from megarl.config import Config
from megarl.data.batch import Batch


def set_token_columns(
    batch: Batch,
    rows: Sequence[int],
    config: Config,
    *,
    rewards: Sequence[float],
    update_number: int,
    shard: Shard = WHOLE,
) -> None:
    """Set the columns `step_tokens.TOKEN_COLUMNS` of one optimizer step over `rows`; those of other rows are 0.

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


def token_columns_part(
    batch: Batch, shard: Shard, config: Config, update_number: int, rows: Sequence[int], rewards: Sequence[float]
) -> None:
    """`set_token_columns` as a `RowWork`."""
    set_token_columns(batch, rows, config, rewards=rewards, update_number=update_number, shard=shard)
