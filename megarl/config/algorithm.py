"""The section `algorithm` of the config: advantages, losses, KL, corrections and shaping, each field with its meaning under it.

Pure values, importable without torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megarl.algorithms.catalogue import CORRECTION_BOUNDS, EstimatorNeeds, LossNeeds
from megarl.algorithms.user_algorithms import estimator_needs, loss_needs
from megarl.config.option_sections import with_options
from megarl.config.presets import (
    AdvantageName,
    AggregationName,
    KlEstimator,
    NormalisationName,
    PolicyLossName,
    PresetName,
    fill_preset,
)
from megarl.config.section import Count, Fraction, NonNegative, Positive, Section, UserFunction


class KlConfig(Section):
    """The KL penalty that keeps the policy near the reference, in the loss or in the reward."""

    coef: NonNegative = 0.04
    """Weight of the KL penalty. 0: no penalty, and no reference model is loaded."""
    estimator: KlEstimator = "k3"
    """Estimator of the KL divergence per token (docs/methods.md#kl-to-the-reference)."""
    apply_to: Literal["loss", "reward"] = "loss"
    """Add the penalty to the `loss`, or subtract it from the `reward` of every token."""
    unbiased: bool = False
    """Importance-weight the KL estimate so that it stays unbiased over several updates per step (only for the KL in the
    loss)."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Adaptive KL: move `coef` so that the mean KL of a response reaches this many nats (only for the KL in the reward).
    null: fixed `coef`."""
    horizon: Annotated[float, Field(gt=0)] = 10_000.0
    """Adaptive KL: number of responses over which `coef` is adapted to `target`."""


class OldPolicyKlConfig(Section):
    """The KL penalty of `policy_loss: kl_penalty`, to the policy at the start of the step (docs/methods.md#loss-kl_penalty)."""

    coef: NonNegative = 1.0
    """Weight beta of the penalty."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Double or halve `coef` after a step whose mean KL per token is not within a factor of 1.5 of this many nats. null: fixed
    `coef`."""


class CorrectionConfig(Section):
    """Correction for the difference between the engine's and the trainer's log-probs (docs/methods.md#rollout-correction)."""

    mode: Literal[
        "tis_token", "tis_sequence", "mis_token", "mis_sequence", "mask_sequence", "reject_sequence", "bypass"
    ]  # fmt: skip
    """Truncated (`tis`) or masked (`mis`) importance sampling, responses that get weight 0 or are rejected, or `bypass`: take
    the loss's ratio to the engine's log-probs."""
    low: NonNegative = 0.0
    """Smallest importance ratio that is kept, or that weights are raised to (tis). Default: by `mode`."""
    high: Annotated[float, Field(gt=0)] = 2.0
    """Largest importance ratio that is kept, or that weights are truncated to (tis). Default: by `mode`."""
    normalise: bool = False
    """Divide importance weights (tis, mis) by their mean over the batch."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_mode(cls, tree: Any) -> Any:
        mode = tree.get("mode") if isinstance(tree, dict) else None
        if isinstance(mode, str) and mode in CORRECTION_BOUNDS:
            return dict(zip(("low", "high"), CORRECTION_BOUNDS[mode], strict=True)) | tree
        return tree


class ShapingConfig(Section):
    """Changes to rewards before advantages, in order: penalties, normalisation, clipping (docs/methods.md#reward-shaping)."""

    overlong_tokens: Count = 0
    """DAPO's soft over-long penalty: over this many last tokens before `rollout.max_new_tokens` it grows from 0 to 1. 0:
    off."""
    length_penalty: NonNegative = 0.0
    """Penalty that is subtracted from the reward for every response token."""
    normalise: bool = False
    """Normalise rewards by the running mean and standard deviation of all rewards so far."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Clip rewards to [-x, x]. null: no clipping."""


class EntropyConfig(Section):
    """A bonus for entropy, fixed or steered, and a loss on uncertain tokens alone (docs/methods.md#entropy)."""

    coef: NonNegative = 0.0
    """Weight of the entropy bonus in the policy loss. With `target`: its first value."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Adaptive bonus: given in steps that begin with a mean entropy per token of at most this many nats, and moved by `delta`
    every step. null: fixed `coef`."""
    delta: Annotated[float, Field(gt=0)] = 0.005
    """Adaptive bonus: by how much its weight grows after a step at or below `target`, and shrinks after another."""
    max_coef: Annotated[float, Field(gt=0)] = 1.0
    """Adaptive bonus: its largest weight."""
    top_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Policy loss on this share of an optimizer step's sampled tokens only: those of the largest entropy
    (docs/methods.md#loss-on-the-top-share-of-entropies)."""

    @property
    def reads_pass(self) -> bool:
        """Return whether it reads the entropies of the policy's pass before the update."""
        return self.target is not None or self.top_share < 1


class PositiveNllConfig(Section):
    """VAPO's cross-entropy of right responses, added to the policy loss (docs/methods.md#positive-examples)."""

    coef: NonNegative = 0.0
    """Weight of the mean cross-entropy per token of the step's right responses in the policy loss."""
    threshold: float = 0.0
    """Responses whose reward, before shaping, is above this number are right."""


@with_options
class AlgorithmConfig(Section):
    """The algorithm. The preset `name` fills in the fields that you leave out; `megarl config CONFIG` shows the result."""

    name: PresetName = "grpo"
    """Preset that fills in the fields whose default is `by algorithm.name`."""
    advantage: AdvantageName | UserFunction = "grpo"
    """Advantage estimator (docs/methods.md#advantages), or your own as `package.module:function` or
    `path/to/file.py:function`."""
    advantage_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an estimator of your own, or of `gae`, `pass_at_k` or `gigpo` (docs/methods.md#advantages)."""
    policy_loss: PolicyLossName | UserFunction = "clip"
    """Policy loss per token (docs/methods.md#policy-losses), or your own as `package.module:function` or
    `path/to/file.py:function`."""
    policy_loss_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a policy loss of your own, or of `sapo`, `clip_cov`, `kl_cov`, `dpo` or `ipo`
    (docs/methods.md#policy-losses)."""
    aggregation: AggregationName = "seq_mean_token_mean"
    """How token losses are averaged into one number (docs/methods.md#aggregation)."""
    norm_length: Positive | None = None
    """The constant length L of `seq_mean_token_sum_norm`. null: `rollout.max_new_tokens`."""
    clip_low: NonNegative = 0.2
    """Lower clipping range of the ratio (epsilon low): it is clipped at 1 - `clip_low` (gmpo: e^-`clip_low`)."""
    clip_high: NonNegative = 0.2
    """Upper clipping range of the ratio (epsilon high; DAPO: 0.28): it is clipped at 1 + `clip_high` (gmpo:
    e^`clip_high`)."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """The bound c of `policy_loss: dual_clip` for negative advantages."""
    old_policy_kl: OldPolicyKlConfig = OldPolicyKlConfig()
    """KL to the policy at the start of the step, in `policy_loss: kl_penalty`."""
    epochs: Positive = 1
    """Number of passes over the sequences of a step (PPO epochs, GRPO's mu)."""
    mini_batches: Positive = 1
    """Number of mini-batches that the sequences of a step are split into; each is one optimizer step."""
    gamma: Fraction = 1.0
    """Discount factor per token; per turn for `turn_rloo` and `gigpo`."""
    gae_lambda: Fraction = 1.0
    """Lambda of generalised advantage estimation (GAE)."""
    advantage_normalisation: NormalisationName = "none"
    """Whiten advantages over the batch or group, or only divide by the root mean square (`_rms`). Default: as published
    for the estimator (docs/methods.md#normalisation)."""
    advantage_eps: NonNegative = 1e-6
    """Added to the standard deviation that advantages are divided by."""
    unbiased_std: bool = True
    """Divide the variance of advantages by n - 1 (true) or n (false)."""
    kl: KlConfig = KlConfig()
    """KL penalty that keeps the policy near the reference."""
    entropy: EntropyConfig = EntropyConfig()
    """Entropy bonus, and a loss on the most uncertain tokens alone."""
    positive_nll: PositiveNllConfig = PositiveNllConfig()
    """Cross-entropy of right responses beside the policy loss."""
    shaping: ShapingConfig = ShapingConfig()
    """Changes to rewards before the advantage."""
    truncated_responses: Literal["keep", "mask", "exclude", "bootstrap"] = "keep"
    """Responses that hit the length limit. `keep`: train on them. `mask`: exclude them from the loss. `exclude`: from baselines
    too. `bootstrap` (GAE only): use the critic's value of the last state."""
    rollout_correction: Annotated[tuple[CorrectionConfig, ...], Field(strict=False)] = ()
    """Corrections for the difference between the engine's and the trainer's log-probs, applied together; a single one may be
    written without a list. `{mode: none}`: none."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_name(cls, tree: Any) -> Any:
        return fill_preset(tree)

    @field_validator("rollout_correction", mode="before")
    @classmethod
    def _as_list(cls, given: Any) -> Any:
        listed = [given] if isinstance(given, dict) else given
        if not isinstance(listed, list | tuple):
            return given
        return [correction for correction in listed if not (isinstance(correction, dict) and correction.get("mode") == "none")]

    @property
    def bypasses_old_log_probs(self) -> bool:
        """Return whether the ratio of the loss is to the engine's log-probs."""
        return any(correction.mode == "bypass" for correction in self.rollout_correction)

    @property
    def estimator_needs(self) -> EstimatorNeeds:
        """The needs of the advantage estimator; asks the user's file if it is their own."""
        return estimator_needs(self.advantage, tuple(self.advantage_args))

    @property
    def loss_needs(self) -> LossNeeds:
        """The needs of the policy loss; asks the user's file if it is their own."""
        return loss_needs(self.policy_loss, tuple(self.policy_loss_args))
