"""The protocol's losses on log-probs: sums over tokens, the same functions on ranks and in the driver. Pure tensors.

Formulas are those that the client's documentation states; p is the policy's probability of a target, q the sampler's. All are
differentiated by log p. Below, r = p/q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.data.stream import FILLS, PackedStream, ScoredValues
from megarl.runs.update_metrics import LOG_PROBS

LOSS = "loss:sum"
"""Name of the metric that is the loss."""
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
"""Least and largest ratio that is not clipped: parameters, or inputs with a value of each token."""


@dataclass(frozen=True)
class LossForm:
    """Names that a loss reads besides `target_tokens`: inputs that a datum must have, may have, and parameters with defaults.

    `wide`: it takes several targets per position.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    parameters: Mapping[str, float] = field(default_factory=dict)
    wide: bool = False


_SAMPLED = ("logprobs", "advantages")
_CLIPPED: dict[str, Any] = {"optional": THRESHOLDS, "parameters": {THRESHOLDS[0]: 0.8, THRESHOLDS[1]: 1.2}}
FORMS: dict[str, LossForm] = {
    "cross_entropy": LossForm(("weights",), wide=True),
    "importance_sampling": LossForm(_SAMPLED),
    "ppo": LossForm(_SAMPLED, **_CLIPPED),
    "cispo": LossForm(_SAMPLED, **_CLIPPED),
    "dro": LossForm(_SAMPLED, parameters={"beta": 0.05}),
    "gspo": LossForm((*_SAMPLED, "sequence_ratio_mask"), **_CLIPPED),
}
"""The losses by name. `custom` is none of them: its gradients come back as weights of `cross_entropy`."""


@dataclass(frozen=True)
class Given:
    """Values that a loss reads: `columns` float `[N]` (`[N, K]` of several targets) by name, parameters, whose each token is.

    `response` int64 `[N]` numbers the data from 0 to `responses` − 1.
    """

    columns: Mapping[str, Tensor]
    parameters: Mapping[str, float]
    response: Tensor
    responses: int

    def log_ratio(self, log_probs: Tensor) -> Tensor:
        """log r `[N]`, 0 where the advantage is 0: nothing depends on it there, and it may be beyond what exp can take."""
        return torch.where(self.columns["advantages"] != 0, log_probs - self.columns["logprobs"], 0.0)

    def clip(self, ratio: Tensor) -> Tensor:
        """The ratios `[N]` between the thresholds, of each token where there are such."""
        low, high = (self._threshold(name, ratio) for name in THRESHOLDS)
        return torch.clamp(ratio, low, high)

    def _threshold(self, name: str, ratio: Tensor) -> Tensor:
        return self.columns[name] if name in self.columns else torch.full_like(ratio, self.parameters[name])


def cross_entropy(log_probs: Tensor, given: Given) -> Tensor:
    """−w log p, of `[N]` or `[N, K]`."""
    return -given.columns["weights"] * log_probs


def importance_sampling(log_probs: Tensor, given: Given) -> Tensor:
    """−r A."""
    return -given.log_ratio(log_probs).exp() * given.columns["advantages"]


def ppo(log_probs: Tensor, given: Given) -> Tensor:
    """−min(r A, clip(r) A)."""
    return _clipped(given.log_ratio(log_probs).exp(), given)


def cispo(log_probs: Tensor, given: Given) -> Tensor:
    """−clip(r) A log p, in which clip(r) has no gradient."""
    weight = given.clip(given.log_ratio(log_probs).exp()).detach()
    return -weight * given.columns["advantages"] * log_probs


def dro(log_probs: Tensor, given: Given) -> Tensor:
    """−(A log p − ½ β (log p − log q)²)."""
    columns, difference = given.columns, log_probs - given.columns["logprobs"]
    return -(columns["advantages"] * log_probs - 0.5 * given.parameters["beta"] * difference.square())


def gspo(log_probs: Tensor, given: Given) -> Tensor:
    """−min(s A, clip(s) A) with s = exp of the mean of log r over the datum's `sequence_ratio_mask`.

    Of each token s is the same number, and its gradient is s times that of the token's own log p (GSPO-token,
    arXiv 2507.18071 eq. 13–14). A mask that is all zero makes s = 1.
    """
    mask, zeros = given.columns["sequence_ratio_mask"], log_probs.new_zeros(given.responses)
    total = zeros.index_add(0, given.response, mask * (log_probs - given.columns["logprobs"]).detach())
    count = zeros.index_add(0, given.response, mask)
    mean = torch.where(count != 0, total / torch.where(count != 0, count, 1.0), 0.0)[given.response]
    log_ratio = torch.where(given.columns["advantages"] != 0, mean + log_probs - log_probs.detach(), 0.0)
    return _clipped(log_ratio.exp(), given)


def _clipped(ratio: Tensor, given: Given) -> Tensor:
    advantages = given.columns["advantages"]
    return -torch.minimum(ratio * advantages, given.clip(ratio) * advantages)


_FORMULAS: dict[str, Callable[[Tensor, Given], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


def token_losses(name: str, log_probs: Tensor, given: Given) -> Tensor:
    """The loss of each token, `[N]` or `[N, K]` as `log_probs`; their sum is the loss. 0 of tokens that fill up."""
    losses = _FORMULAS[name](log_probs, given)
    if FILLS not in given.columns:
        return losses
    fills = given.columns[FILLS] != 0
    return torch.where(fills if losses.dim() == 1 else fills[:, None], 0.0, losses)


@dataclass(frozen=True)
class ServedLoss:
    """A loss as ranks call it (`experience/objectives.py`): log-probs of the client's first `rows` data come with the metrics.

    `targets`: how many per position are in the column `SCORED_IDS`; 0: there is none, the targets are the next tokens.
    """

    name: str
    parameters: Mapping[str, float]
    rows: int
    targets: int = 0

    def __call__(self, output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        """`output` float32 `[N, C]`: log-prob and entropy of the next token, log-probs of `targets` last → (loss, sums)."""
        log_probs = output[:, output.shape[1] - self.targets :] if self.targets else output[:, 0]
        if self.targets == 1:
            log_probs = log_probs[:, 0]
        given = Given(stream.columns, self.parameters, stream.response, len(stream.owners))
        loss = token_losses(self.name, log_probs, given).sum()
        return loss, {LOSS: loss.detach(), LOG_PROBS: ScoredValues(stream, log_probs.detach(), self.rows)}
