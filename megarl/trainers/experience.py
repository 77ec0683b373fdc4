"""From rewards and log-probs to advantages, returns and loss weights: METHODS §3 to §6 on the driver, over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms import ADVANTAGES, AdvantageInputs, RunningMean, kl_per_token, token_weights
from megarl.config import Config
from megarl.data.batch import Batch


@dataclass(frozen=True)
class RewardStatistics:
    """What a step's rewards looked like: mean, standard deviation, and the share of groups whose rewards all agree."""

    mean: float
    std: float
    tied_groups: float


def reward_statistics(scores: Tensor, groups: Tensor) -> RewardStatistics:
    """`scores` float `[B]`, `groups` int64 `[B]`."""
    spreads = [scores[groups == group].max() - scores[groups == group].min() for group in groups.unique()]
    tied = sum(float(spread == 0) for spread in spreads) / max(len(spreads), 1)
    return RewardStatistics(float(scores.mean()), float(scores.std(correction=0)), tied)


def estimate_advantages(batch: Batch, rewards: Sequence[float], config: Config, baseline: RunningMean) -> RunningMean:
    """Add the columns `advantages` and, for a critic, `returns` to `batch` (METHODS §3); returns the next `baseline`.

    The KL penalty enters here only if it belongs to the reward. A response that is alone in its group teaches nothing
    under a group estimator: it is masked out, and so counts in no denominator.
    """
    algorithm = config.algorithm
    scores = torch.tensor(rewards, dtype=torch.float32)
    if algorithm.reward_clip is not None:
        scores = scores.clamp(-algorithm.reward_clip, algorithm.reward_clip)
    penalty = torch.zeros(batch.mask.shape)
    if algorithm.kl.coef and algorithm.kl.where == "reward":
        kl = kl_per_token(batch.columns["old_log_probs"], batch.columns["reference_log_probs"], algorithm.kl.estimator)
        penalty = -algorithm.kl.coef * kl * batch.mask
    outputs = ADVANTAGES.resolve(algorithm.advantage)(
        AdvantageInputs(
            scores=scores,
            token_penalty=penalty,
            mask=batch.mask,
            groups=batch.groups,
            values=batch.columns.get("values"),
            truncated=torch.tensor([sample.truncated for sample in batch.samples]),
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            eps=algorithm.advantage_eps,
            unbiased=algorithm.unbiased_std,
            baseline=baseline,
        )
    )
    batch.columns["advantages"] = outputs.advantages
    if outputs.returns is not None:
        batch.columns["returns"] = outputs.returns
    if outputs.dropped is not None:
        batch.mask[outputs.dropped] = False
    return outputs.baseline or baseline


def mini_batch_rows(batch: Batch, mini_batches: int, seed: int) -> list[list[int]]:
    """Rows of each mini-batch: whole groups in a seeded order, so that a group's prompt is computed once where it can be."""
    order = torch.randperm(int(batch.groups.max()) + 1, generator=torch.Generator().manual_seed(seed))
    rank = {int(group): place for place, group in enumerate(order)}
    rows = sorted(range(len(batch)), key=lambda row: (rank[int(batch.groups[row])], row))
    size = len(rows) // mini_batches
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def set_loss_weights(batch: Batch, rows: Sequence[int], config: Config) -> None:
    """Column `weights`: the global denominators of one optimizer step over `rows` (METHODS §2)."""
    norm_length = config.algorithm.norm_length or config.rollout.max_new_tokens
    mask = torch.zeros_like(batch.mask)
    mask[list(rows)] = batch.mask[list(rows)]
    batch.columns["weights"] = token_weights(mask, config.algorithm.aggregation, norm_length=norm_length)
