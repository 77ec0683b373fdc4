"""Needs of every advantage estimator and policy loss: the one place that says so. Importable without torch.

The config, its checks and the training loop read these tables and compare no names; `tests/algorithms/test_catalogue.py`
holds the tables against the registered functions. A user's own function says what it needs by the decorator `needs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
ESTIMATOR_SETTINGS = ("gamma", "lam", "eps", "unbiased")
"""The constants of the estimators without their normalisation, as `AdvantageInputs` names them."""
NORMALISATIONS = ("none", "batch", "group", "batch_rms", "group_rms")
"""Treatments of advantages (`advantages.normalised`)."""


@dataclass(frozen=True)
class Argument:
    """An argument that a built-in function takes by name from the config: a number and where it must lie, or a switch."""

    name: str
    least: float = 0.0
    """Its lower bound, which it may equal if `least_allowed`."""
    most: float = math.inf
    """Its upper bound, which it may equal unless it is infinite."""
    least_allowed: bool = False
    kind: Literal["number", "whole", "switch"] = "number"
    required: bool = False
    """Has no default."""
    below_group: bool = False
    """Less than `rollout.samples_per_prompt`."""

    def allows(self, value: object) -> bool:
        """Return whether `value` is a finite number within the bounds and whole if it must be, or of a switch true or false."""
        if self.kind == "switch" or isinstance(value, bool):
            return self.kind == "switch" and isinstance(value, bool)
        if not isinstance(value, int if self.kind == "whole" else int | float) or not math.isfinite(value):
            return False
        return self.least < value <= self.most or (self.least_allowed and value == self.least)

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.kind == "switch":
            return "true or false"
        upper = "" if self.most == math.inf else f" and at most {self.most:g}"
        what = "a whole number" if self.kind == "whole" else "a number"
        return f"{what} {'of at least' if self.least_allowed else 'above'} {self.least:g}{upper}"


@dataclass(frozen=True, kw_only=True)
class EstimatorNeeds:
    """Needs of an advantage estimator that a run must meet. A need that is false is not computed for it."""

    group: bool = False
    """Compares the responses of one prompt, so `rollout.samples_per_prompt` must be at least 2."""
    values: bool = False
    """Reads the critic's `values`, and answers `returns`, which the critic is trained on."""
    greedy: bool = False
    """Reads `greedy_scores`, the reward of a greedy response to every prompt."""
    step_rewards: bool = False
    """Reads `step_rewards` and `step_ends`, which a process reward model gives."""
    token_penalty: bool = True
    """Has a place for `token_penalty`, so the KL penalty may be in the reward."""
    rollout_log_probs: bool = False
    """Reads `rollout_log_probs`; every estimator is given it."""
    old_log_probs: bool = False
    """Reads `old_log_probs`: a step begins with a pass of the policy."""
    entropy: bool = False
    """Reads `entropy`, which the same pass gives."""
    collision: bool = False
    """Reads `collision`, which the same pass gives."""
    reference_log_probs: bool = False
    """Reads `reference_log_probs`, so the reference is loaded whatever `algorithm.kl.coef` is."""
    teacher_log_probs: bool = False
    """Reads `teacher_log_probs`, so `teacher.path` must be set."""
    whole_batch: bool = False
    """A user's own estimator that must be given all rows of the batch at once, as it does not use `inputs.shard`."""
    sources: bool = False
    """Reads each source of reward and its weight in place of their sum, so nothing may be shaped."""
    turn_rewards: bool = False
    """Reads the rewards of turns, so that of a whole response may not be normalised or clipped; `gamma` is per turn."""
    turn_states: bool = False
    """Reads the state before each turn, which only an environment, or an episode of the user's own, can name."""
    normalisation: str = "none"
    """Treatment of its advantages if the config does not say, one of `NORMALISATIONS`."""
    per_response: bool = False
    """Gives one number to all tokens of a response, so its advantages are normalised over responses, not over tokens."""
    settings: tuple[str, ...] = ESTIMATOR_SETTINGS
    """The constants that it reads; of a user's own estimator nobody knows, so all."""
    arguments: tuple[Argument, ...] = ()
    """Arguments that a built-in estimator takes by name from `algorithm.advantage_args`."""

    @property
    def reads_policy(self) -> bool:
        """Return whether it reads what a pass of the policy at the start of the step gives."""
        return self.old_log_probs or self.entropy or self.collision


SETTINGS = ("clip_low", "clip_high", "dual_clip", "kl_coef")
"""The constants of the policy losses, as `LossSettings` names them."""


@dataclass(frozen=True, kw_only=True)
class LossNeeds:
    """Needs of a policy loss besides log-probs, old log-probs, advantages, `response` and `settings`."""

    settings: tuple[str, ...] = SETTINGS
    """The constants that it reads; of a user's own loss nobody knows, so all."""
    lower_bound: bool = False
    """Clips ratios at 1 − ε_low from below, so ε_low must be below 1."""
    arguments: tuple[Argument, ...] = ()
    """Numbers that a built-in loss takes by name from `algorithm.policy_loss_args`."""
    choice: tuple[Argument, ...] = ()
    """Of a built-in loss: it takes `chosen` float `[N]`, 1 at the tokens that `token_choice.CHOICES` picks for it from the
    whole optimizer step, else 0; these are the numbers that the choice takes from `algorithm.policy_loss_args`."""
    needs_updates: bool = False
    """The loss's term beside −ρA has no gradient in the first of a step's updates, where ρ = 1."""
    sequence_ratio: bool = False
    """Its ratio is a mean over a response, which hardly leaves 1: ε is of the order of 1e-4."""
    clip: tuple[float, float] = (0.2, 0.2)
    """`clip_low` and `clip_high` if the config does not say."""
    ratio: bool = True
    """Reads the ratio to `old_log_probs`, so that it may be trained on tokens of an older policy."""
    rollout_log_probs: bool = False
    """Takes `rollout_log_probs` float `[N]`: the engine's log-probs of the sampled tokens."""
    reference_log_probs: bool = False
    """Takes `reference_log_probs` float `[N]`, so the reference is loaded whatever `algorithm.kl.coef` is."""
    teacher_log_probs: bool = False
    """Takes `teacher_log_probs` float `[N]`, so `teacher.path` must be set."""
    pairs: bool = False
    """Compares the best response of a prompt with the worst, by their advantages, and is no function of single tokens."""
    entropy: bool = False
    """Takes `entropy` float `[N]`, of the policy in training before each token; gradients flow through it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The further arguments that it takes, which are columns of the batch."""
        names = ("rollout_log_probs", "reference_log_probs", "teacher_log_probs")
        return (*(name for name in names if getattr(self, name)), *(("chosen",) if self.choice else ()))

    @property
    def further(self) -> tuple[str, ...]:
        """All further arguments that it takes."""
        return (*self.columns, *(("entropy",) if self.entropy else ()))


ESTIMATORS: dict[str, EstimatorNeeds] = {
    "gae": EstimatorNeeds(
        values=True,
        normalisation="batch",
        settings=("gamma", "lam"),
        arguments=(Argument("critic_lambda", most=1, least_allowed=True), Argument("length_alpha")),
    ),
    "reinforce": EstimatorNeeds(settings=("gamma",)),
    "reinforce_moving_baseline": EstimatorNeeds(per_response=True, settings=()),
    "reinforce_plus_plus": EstimatorNeeds(normalisation="batch", settings=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorNeeds(group=True, normalisation="batch", settings=()),
    "grpo": EstimatorNeeds(group=True, normalisation="group", per_response=True, settings=()),
    "grpo_process": EstimatorNeeds(group=True, step_rewards=True, settings=("eps", "unbiased")),
    "dr_grpo": EstimatorNeeds(group=True, per_response=True, settings=()),
    "rloo": EstimatorNeeds(group=True, per_response=True, settings=()),
    "remax": EstimatorNeeds(greedy=True, settings=()),
    "opo": EstimatorNeeds(group=True, per_response=True, settings=()),
    "gpg": EstimatorNeeds(group=True, per_response=True, settings=()),
    "gdpo": EstimatorNeeds(
        group=True, sources=True, token_penalty=False, normalisation="batch", per_response=True, settings=("eps", "unbiased")
    ),
    "pass_at_k": EstimatorNeeds(
        group=True,
        per_response=True,
        settings=("eps",),
        arguments=(Argument("k", 1, least_allowed=True, kind="whole", required=True, below_group=True),),
    ),
    "optimal_token_baseline": EstimatorNeeds(group=True, old_log_probs=True, collision=True, settings=()),
    "turn_rloo": EstimatorNeeds(group=True, turn_rewards=True, settings=("gamma",)),
    "gigpo": EstimatorNeeds(
        group=True,
        turn_rewards=True,
        turn_states=True,
        settings=("gamma", "eps", "unbiased"),
        arguments=(Argument("step_weight", least_allowed=True), Argument("divide_by_std", kind="switch")),
    ),
}
"""Advantage estimators by name."""

POLICY_LOSSES: dict[str, LossNeeds] = {
    "clip": LossNeeds(settings=("clip_low", "clip_high"), lower_bound=True),
    "dual_clip": LossNeeds(settings=("clip_low", "clip_high", "dual_clip"), lower_bound=True),
    "gspo": LossNeeds(settings=("clip_low", "clip_high"), lower_bound=True, sequence_ratio=True, clip=(3e-4, 4e-4)),
    "gmpo": LossNeeds(settings=("clip_low", "clip_high"), clip=(0.4, 0.4)),
    "sapo": LossNeeds(settings=(), arguments=(Argument("tau_positive"), Argument("tau_negative"))),
    "cispo": LossNeeds(settings=("clip_low", "clip_high"), clip=(1.0, 4.0)),
    "reinforce": LossNeeds(settings=(), ratio=False),
    "kl_penalty": LossNeeds(settings=("kl_coef",)),
    "clip_cov": LossNeeds(
        settings=("clip_low", "clip_high"),
        lower_bound=True,
        choice=(Argument("share", most=1), Argument("low"), Argument("high")),
    ),
    "kl_cov": LossNeeds(settings=(), needs_updates=True, arguments=(Argument("coef"),), choice=(Argument("share", most=1),)),
}
"""Policy losses by name."""

COVARIANCE_BOUNDS = (1.0, 5.0)
"""`low` and `high` of `clip_cov` if the config does not say."""

_OF_PAIRS = LossNeeds(
    settings=(), arguments=(Argument("beta"), Argument("rpo_alpha")), ratio=False, reference_log_probs=True, pairs=True
)
PAIR_POLICY_LOSSES: dict[str, LossNeeds] = {"dpo": _OF_PAIRS, "ipo": _OF_PAIRS}
"""The preference losses of pairs (`preference.PREFERENCE_LOSSES`) that can be policy losses, by name."""
LOSS_NEEDS = POLICY_LOSSES | PAIR_POLICY_LOSSES
"""Needs of each name of `algorithm.policy_loss`."""

CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {
    "tis_token": (0.0, 2.0),
    "tis_sequence": (0.0, 5.0),
    "mis_token": (0.5, 5.0),
    "mis_sequence": (0.1, 10.0),
    "mask_sequence": (0.999, 1.001),
    "reject_sequence": (0.999, 1.001),
}
"""By correction of the rollout's log-probs, the ratios that it lets pass if the config does not say (`off_policy.correction`).

Of a token IcePop's; of a sequence wider, as a sum over thousands of tokens spreads; of a geometric mean close to 1, as that
hardly does.
"""
WEIGHTS = ("tis_token", "tis_sequence", "mis_token", "mis_sequence")
"""The corrections that are importance weights; of these there can be one."""


def needs(
    *,
    group: bool = False,
    values: bool = False,
    greedy: bool = False,
    step_rewards: bool = False,
    token_penalty: bool = True,
    old_log_probs: bool = False,
    rollout_log_probs: bool = False,
    reference_log_probs: bool = False,
    teacher_log_probs: bool = False,
    entropy: bool = False,
    collision: bool = False,
    whole_batch: bool = False,
) -> Callable[[F], F]:
    """Decorator by which a user's own function says what it needs: see `EstimatorNeeds` and `LossNeeds`.

    `rollout_log_probs` to `entropy` are for estimators and losses, the others for an estimator. A function without the
    decorator needs nothing.
    """
    declared: dict[str, Any] = dict(locals())  # all of the above
    of_losses = ("rollout_log_probs", "reference_log_probs", "teacher_log_probs", "entropy")

    def mark(function: F) -> F:
        marked: Any = function
        marked.estimator_needs = EstimatorNeeds(**declared)
        marked.loss_needs = LossNeeds(**{name: declared[name] for name in of_losses})
        return function

    return mark
