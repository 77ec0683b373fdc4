"""The losses that training ranks compute: pure maths of `algorithms` applied to a stream's scored tokens.

Objectives are plain values: the driver sends them to the ranks. Their weights carry the global denominators, so a
loss is a sum, whatever the micro-batch. Metrics stay on the device until the pass is over: asking for a number waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megarl.algorithms import K3_LIMIT, POLICY_LOSSES, LossSettings, kl_per_token, mismatch_sums, value_loss
from megarl.data.stream import PackedStream, ScoredValues
from megarl.errors import MegarlError
from megarl.experience.step_parts import MixedLoss, StreamLoss, TokenTerm
from megarl.runs.update_metrics import LOG_PROBS


@dataclass(frozen=True)
class PolicyObjective:
    """Policy loss, KL penalty and further terms in the loss, and entropy bonus.

    Columns it reads: `weights`, `advantages`; `old_log_probs` (absent: the step is on-policy and the ratio is 1);
    `reference_log_probs` (absent: no KL is measured); `rollout_log_probs`; `correction` and `top_entropy` (absent: 1), which
    multiply the policy loss alone; `nll_weights` (absent: 0), the weights of right responses' cross-entropy; and those of
    `terms`. A stream with the column of one of the `mixed` losses has that loss alone.
    """

    name: str
    settings: LossSettings = field(default_factory=LossSettings)
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    nll_coef: float = 0.0
    terms: tuple[TokenTerm, ...] = ()
    """Further terms, which may read what stands behind the first two columns of the output."""
    limited: bool = False
    """The third column of the output is the log of the kept tokens' probability (docs/methods.md, sampling limits)."""
    mixed: tuple[MixedLoss, ...] = ()
    shown_rows: int = 0
    """Number of the batch's first rows whose log-probs come with the metrics, as `LOG_PROBS`."""
    bypass: bool = False
    """The ratio is to the engine's log-probs instead."""
    also_given: tuple[str, ...] = ()
    """Columns, and `entropy`, that the loss takes by name (`LossNeeds.further`)."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the config gives to a loss of the user's own, by name."""
    of_stream: StreamLoss | None = None
    """The policy loss in place of that called `name`, where it is not one of single tokens."""

    def __call__(self, output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        """`output` float32 `[N, C]`: log-prob, entropy, and what `limited` or `terms` ask for → (loss, sums).

        With sampling limits the first two are of the kept tokens, and so are `old_log_probs` and, if there are these,
        `rollout_log_probs`; the KL to the reference is measured over all tokens, and the penalty is on the kept ones.
        """
        log_probs, entropy, columns = output[:, 0], output[:, 1], stream.columns
        kept_log_probability = output[:, 2].detach() if self.limited else output.new_zeros(())
        for mixed in self.mixed:
            if mixed.column in columns:
                return mixed(log_probs, stream)
        if "old_log_probs" not in columns:
            columns = columns | {"rollout_log_probs": columns["rollout_log_probs"] - kept_log_probability}
        trainers = columns.get("old_log_probs", log_probs.detach())
        if self.of_stream is not None:
            per_token, sums = self.of_stream(log_probs, stream)
        else:
            per_token, sums = self._token_loss(log_probs, entropy, trainers, stream.response, columns)
        for factor in ("correction", "top_entropy"):
            if factor in columns:
                per_token = per_token * columns[factor]
        metrics: dict[str, Any] = {f"policy/{name}": value for name, value in sums.items()}
        metrics["policy/loss"] = (columns["weights"] * per_token.detach()).sum()
        loss = per_token - self.entropy_coef * entropy
        if "reference_log_probs" in columns:
            reference = columns["reference_log_probs"]
            measured = kl_per_token(log_probs.detach() + kept_log_probability, reference, "k3")
            metrics["kl/reference"] = measured.sum()
            if self.kl_coef:
                sampler = columns["rollout_log_probs"] if self.kl_unbiased else None
                limit = K3_LIMIT if self.kl_estimator == "k3" else None
                estimate = kl_per_token(log_probs, reference, self.kl_estimator, sampler_log_probs=sampler, limit=limit)
                loss = loss + self.kl_coef * estimate
                if limit is not None:
                    metrics["kl/clamped"] = (measured > limit).float().sum()
        for term in self.terms:
            of_tokens, figures = term(output, log_probs, columns)
            loss = loss if of_tokens is None else loss + of_tokens
            metrics |= figures
        mismatch = mismatch_sums(trainers, columns["rollout_log_probs"])
        metrics |= {f"mismatch/{name}": value for name, value in mismatch.items()}
        metrics |= {"policy/entropy": entropy.detach().sum(), "tokens": float(len(log_probs))}
        if self.limited:
            metrics["policy/kept_probability"] = kept_log_probability.exp().sum()
        if self.shown_rows:
            metrics[LOG_PROBS] = ScoredValues(stream, log_probs.detach() + kept_log_probability, self.shown_rows)
        total = (columns["weights"] * loss).sum()
        if "nll_weights" in columns:
            cross_entropy = -(columns["nll_weights"] * log_probs).sum()
            total = total + self.nll_coef * cross_entropy
            metrics["policy/nll"] = cross_entropy.detach()
        return total, metrics

    def _token_loss(
        self, log_probs: Tensor, entropy: Tensor, trainers: Tensor, response: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        old = columns["rollout_log_probs"] if self.bypass else trainers
        further = {name: entropy if name == "entropy" else columns[name] for name in self.also_given} | dict(self.arguments)
        loss_function: Callable[..., tuple[Tensor, dict[str, Tensor]]] = POLICY_LOSSES.resolve(self.name, self.arguments)
        return loss_function(log_probs, old, columns["advantages"], response=response, settings=self.settings, **further)


TokenFunction = Callable[[Tensor, Mapping[str, Tensor]], Tensor | tuple[Tensor, Mapping[str, Any]]]
"""(log-probs `[N]` of the sampled tokens, columns `[N]` by name) → the loss of each token `[N]`, or that and sums by name."""


def cross_entropy(log_probs: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Negative log-likelihood of each token: what supervised training minimises."""
    return -log_probs


@dataclass(frozen=True)
class OwnLoss:
    """A function of a user as the loss: the sum of the tokens' losses by the column `weights`. It sees `entropy` too."""

    function: TokenFunction

    def __call__(self, output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        """`output` float32 `[N, C]`: log-prob and entropy first → (loss, sums).

        Raises:
            MegarlError: the function returned something else than one loss per token.
        """
        log_probs, columns = output[:, 0], {**stream.columns, "entropy": output[:, 1]}
        answer = self.function(log_probs, columns)
        per_token, sums = answer if isinstance(answer, tuple) else (answer, {})
        if not isinstance(per_token, Tensor) or per_token.shape != log_probs.shape:
            is_a = f"a tensor {[*per_token.shape]}" if isinstance(per_token, Tensor) else f"a {type(per_token).__name__}"
            name = getattr(self.function, "__name__", "loss")
            raise MegarlError(f"loss '{name}' returned {is_a}; it must return a loss per token, a tensor {[*log_probs.shape]}")
        loss = (columns["weights"] * per_token).sum()
        return loss, {"policy/loss": loss.detach(), "tokens": float(len(log_probs)), **sums}


@dataclass(frozen=True)
class ValueObjective:
    """Clipped value loss. Columns it reads: `weights`, `values` (the old ones), `returns`."""

    clip_range: float

    def __call__(self, output: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        """`output` float32 `[N, 1]` → (loss, sums over tokens)."""
        values, columns = output[:, 0], stream.columns
        per_token, sums = value_loss(values, columns["values"], columns["returns"], self.clip_range)
        loss = (columns["weights"] * per_token).sum()
        error = columns["returns"] - values.detach()
        metrics = {f"critic/{name}": value for name, value in sums.items()}
        return loss, metrics | {
            "critic/loss": loss.detach(),
            "critic/value": values.detach().sum(),
            "critic/error_squared": (error * error).sum(),
            "tokens": float(len(values)),
        }
