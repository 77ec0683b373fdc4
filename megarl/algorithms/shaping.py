"""Shaping of a step's rewards before advantages. All in the units of the reward, one number per response.

Formulas and sources: docs/methods.md#reward-shaping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import last_of_each_row
from megarl.errors import ConfigError


def clip_rewards(rewards: Tensor, low: float, high: float) -> Tensor:
    """`rewards` (any shape), none below `low` or above `high`.

    Raises:
        ConfigError: `low` is above `high`.
    """
    if low > high:
        raise ConfigError(f"rewards are clipped to [{low}, {high}]; the lower bound must not be above the upper one")
    return rewards.clamp(low, high)


class RewardNormaliser:
    """(r − mean)/(std + eps) with mean and population std over all rewards so far, those given included.

    The state runs in float64 by the merged form of Welford's update (Chan, Golub and LeVeque 1979). Rewards that have
    all been equal so far become exactly 0; so does the first one, if it comes alone.

    Args:
        eps: added to the standard deviation.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        self.eps = eps
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        """Σ(r − mean)² so far."""

    def normalise(self, rewards: Tensor, counted: Tensor | None = None) -> Tensor:
        """Take `rewards` (any shape, of the whole step) into the state and return them normalised, in their dtype.

        `counted` bool of the same shape: those that the state takes in; None: all.
        """
        self._update(rewards if counted is None else rewards[counted])
        if self.squares == 0:
            return torch.zeros_like(rewards)
        return ((rewards.double() - self.mean) / ((self.squares / self.count) ** 0.5 + self.eps)).to(rewards.dtype)

    def _update(self, rewards: Tensor) -> None:
        if rewards.numel() == 0:
            return
        exact = rewards.double()
        first = exact.flatten()[0]
        new = int(rewards.numel())
        mean = float(first + (exact - first).mean())  # exact where all are equal
        squares = float(((exact - mean) ** 2).sum())
        total, moved = self.count + new, mean - self.mean
        self.squares += squares + moved * moved * self.count * new / total
        self.mean += moved * new / total if self.count else mean
        self.count = total

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint; eps comes from the config."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict()`'s answer."""
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]


STEP_AGGREGATIONS = ("mean", "min", "product", "last")


def aggregate_steps(scores: Tensor, ends: Tensor, how: str) -> Tensor:
    """A response's score from those of its steps (arXiv 2305.20050 §2.6: product and minimum; the mean; the last step's).

    Args:
        scores: float `[B, T]`, a step's score from 0 to 1 at the token that ends it.
        ends: bool `[B, T]`, where steps end; a response without steps scores 0.
        how: one of `STEP_AGGREGATIONS`.

    Returns:
        float `[B]`.
    """
    if how == "mean":
        return torch.where(ends, scores, 0).sum(1) / ends.sum(1).clamp(min=1)
    if how == "min":
        totals = torch.where(ends, scores, torch.inf).amin(1)
    elif how == "product":
        totals = torch.where(ends, scores, 1).prod(1)
    else:
        totals = torch.where(last_of_each_row(ends), scores, 0).sum(1)
    return torch.where(ends.any(1), totals, 0)


def overlong_penalty(lengths: Tensor, max_tokens: int, cache_tokens: int) -> Tensor:
    """DAPO's soft over-long penalty, to be added to the reward (arXiv 2503.14476 eq. 13).

    0 up to L_max − L_cache tokens, then linear to −1 at L_max, and −1 beyond.

    Args:
        lengths: int `[B]`, tokens of each response.
        max_tokens: L_max.
        cache_tokens: L_cache, the tokens before L_max over which the penalty grows, from 1 to L_max.

    Returns:
        float32 `[B]`, from −1 to 0.

    Raises:
        ConfigError: `cache_tokens` is out of its range.
    """
    if not 1 <= cache_tokens <= max_tokens:
        raise ConfigError(f"the over-long penalty's cache is {cache_tokens} tokens; it must be from 1 to {max_tokens}")
    return ((max_tokens - cache_tokens - lengths).float() / cache_tokens).clamp(-1, 0)


def length_penalty(lengths: Tensor, per_token: float) -> Tensor:
    """−`per_token`·length, to be added to the reward: float32 `[B]` for int `lengths` `[B]` in tokens."""
    return -per_token * lengths.float()
