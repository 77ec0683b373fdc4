"""The losses of training on given responses (docs/methods.md#objectives), as values that the driver sends to the ranks.

Numbers of pairs, responses and steps are those of the whole optimizer step, so losses and metrics are sums over
micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import dft_loss
from megarl.algorithms.preference import PreferenceSettings, bco, kto, share_above
from megarl.algorithms.reward_model import pairwise_reward_loss, process_reward_loss
from megarl.data.stream import PackedStream
from megarl.experience.pairs import first_of_each, pair_losses, per_response, sides

LossAndMetrics = tuple[Tensor, dict[str, Any]]
"""(loss, metrics), both this micro-batch's part of a sum."""


@dataclass(frozen=True)
class SupervisedObjective:
    """Next-token cross-entropy on response tokens, with `dft` weighted by their probabilities. Column it reads: `weights`, the
    global denominators."""

    dft: bool = False

    def __call__(self, output: Tensor, stream: PackedStream) -> LossAndMetrics:
        """`output` float32 `[N, 2]` (log-prob, entropy)."""
        per_token = dft_loss(output[:, 0]) if self.dft else -output[:, 0]
        loss = (stream.columns["weights"] * per_token).sum()
        return loss, {"loss": loss.detach()}


@dataclass(frozen=True)
class PairObjective:
    """A preference loss of pairs. Columns it reads: `pair`, `is_chosen`, and `reference_log_probs` if it has a reference."""

    name: str
    settings: PreferenceSettings
    pairs: int
    has_reference: bool = True

    def __call__(self, output: Tensor, stream: PackedStream) -> LossAndMetrics:
        """`output` float32 `[N, 2]` (log-prob, entropy); both sides of a pair are in the stream."""
        sums = per_response(output[:, 0], stream)
        reference = torch.zeros_like(sums)
        if self.has_reference:
            reference = per_response(stream.columns["reference_log_probs"], stream)
        losses, figures = pair_losses(self.name, sides(stream), sums, reference, stream.lengths, self.settings)
        return _mean(losses, figures, self.pairs)


@dataclass(frozen=True)
class KtoObjective:
    """KTO on labelled responses. Columns it reads: `labels` (1 desirable, 0 not), `reference_log_probs`."""

    settings: PreferenceSettings
    responses: int
    kl_reference: float

    def __call__(self, output: Tensor, stream: PackedStream) -> LossAndMetrics:
        """`output` float32 `[N, 2]` (log-prob, entropy)."""
        sums, reference, desirable = _labelled(output, stream)
        kl_reference = torch.full((), self.kl_reference, device=output.device)
        losses, figures = kto(sums, reference, desirable, kl_reference, self.settings)
        return _mean(losses, figures | {"accuracy": _right(sums, reference, desirable)}, self.responses)


@dataclass(frozen=True)
class BcoObjective:
    """BCO on labelled responses. Columns it reads: those of `KtoObjective`."""

    settings: PreferenceSettings
    responses: int

    def __call__(self, output: Tensor, stream: PackedStream) -> LossAndMetrics:
        """`output` float32 `[N, 2]` (log-prob, entropy)."""
        sums, reference, desirable = _labelled(output, stream)
        losses, figures = bco(sums, reference, desirable, self.settings)
        return _mean(losses, figures | {"accuracy": _right(sums, reference, desirable)}, self.responses)


@dataclass(frozen=True)
class RewardModelObjective:
    """The pairwise loss of an outcome reward model. Columns it reads: `pair`, `is_chosen`, `margin` (absent: 0)."""

    pairs: int

    def __call__(self, output: Tensor, stream: PackedStream) -> LossAndMetrics:
        """`output` float32 `[R, 1]`, the score at the last token of each response."""
        chosen, rejected = sides(stream)
        margin = stream.columns.get("margin")
        of_pair = first_of_each(margin, stream)[chosen] if margin is not None else None
        return _mean(*pairwise_reward_loss(output[chosen, 0], output[rejected, 0], of_pair), self.pairs)


@dataclass(frozen=True)
class ProcessRewardObjective:
    """Cross-entropy of a process reward model at the tokens that end steps. Column it reads: `labels`."""

    steps: int

    def __call__(self, output: Tensor, stream: PackedStream) -> LossAndMetrics:
        """`output` float32 `[N, 1]`, the scores at the N step ends."""
        return _mean(*process_reward_loss(output[:, 0], stream.columns["labels"]), self.steps)


def _labelled(output: Tensor, stream: PackedStream) -> tuple[Tensor, Tensor, Tensor]:
    """For each response `[R]` its log-prob, the reference's, and whether it is desirable."""
    reference = per_response(stream.columns["reference_log_probs"], stream)
    return per_response(output[:, 0], stream), reference, first_of_each(stream.columns["labels"], stream).bool()


def _right(log_probs: Tensor, reference: Tensor, desirable: Tensor) -> Tensor:
    """The number of responses that have moved to their label's side of the reference, those that did not move as half."""
    now = log_probs.detach()
    return torch.where(desirable, share_above(now, reference), share_above(reference, now)).sum()


def _mean(losses: Tensor, figures: Mapping[str, Tensor], count: int) -> LossAndMetrics:
    loss = losses.sum() / count
    return loss, {"loss": loss.detach()} | {name: value / count for name, value in figures.items()}
