"""The losses of a config, or those that a program names in their place, as values that ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import POLICY_LOSSES, LossSettings
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.errors import ConfigError, nearest
from megarl.experience.experience import Experience
from megarl.experience.objectives import OwnLoss, PolicyObjective, TokenFunction, ValueObjective, cross_entropy
from megarl.experience.step_parts import StepPart, StreamLoss
from megarl.experience.step_tokens import loss_arguments
from megarl.runs.training_side import CRITIC
from megarl.system.user_code import absolute_name


def policy_objective(
    config: Config,
    experience: Experience,
    parts: Sequence[StepPart],
    *,
    name: str | None = None,
    shown_rows: int = 0,
    stream_loss: StreamLoss | None = None,
) -> PolicyObjective:
    """The config's policy loss with its penalties and bonuses; `name`: another policy loss in its place.

    `experience` has the coefficients that controllers move. `shown_rows` and `stream_loss` are as in `PolicyObjective`.
    """
    algorithm = config.algorithm
    return PolicyObjective(
        absolute_name(name or algorithm.policy_loss),
        LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            kl_coef=experience.old_policy_kl,
        ),
        kl_coef=algorithm.kl.coef if algorithm.kl.apply_to == "loss" else 0.0,
        kl_estimator=algorithm.kl.estimator,
        kl_unbiased=algorithm.kl.unbiased,
        entropy_coef=experience.entropy_coef,
        nll_coef=algorithm.positive_nll.coef,
        terms=tuple(filter(None, (part.token_term() for part in parts))),
        limited=bool(config.rollout.sampling_limits),
        mixed=tuple(filter(None, (part.mixed_loss() for part in parts))),
        shown_rows=shown_rows,
        bypass=algorithm.bypasses_old_log_probs,
        also_given=algorithm.loss_needs.further if name is None else (),
        arguments=loss_arguments(algorithm) if name is None else {},
        of_stream=stream_loss,
    )


def objective_of(
    loss: str | TokenFunction | None, role: str, config: Config, experience: Experience, parts: Sequence[StepPart]
) -> Any:
    """The loss of `role`: None, that of the config; else a policy loss by name, `cross_entropy` or a function.

    Raises:
        ConfigError: it is none of these.
    """
    if role == CRITIC:
        if loss is not None:
            raise ConfigError(f"loss is '{loss}', but role is 'critic', which has its own; leave loss out")
        return ValueObjective(config.critic.value_clip)
    if loss == "cross_entropy":
        return OwnLoss(cross_entropy)
    if loss is None or isinstance(loss, str):
        if loss is not None and ":" not in loss and loss not in [*POLICY_LOSSES]:
            known = ["cross_entropy", *POLICY_LOSSES]
            raise ConfigError(f"loss is '{loss}'{nearest(loss, known)}; it must be {', '.join(known)}, or a function")
        return policy_objective(config, experience, parts, name=loss)
    if not callable(loss):
        raise ConfigError(f"loss is a {type(loss).__name__}; it must be a name or a function(log_probs, columns)")
    return OwnLoss(loss)


def check_columns(batch: Batch, role: str) -> None:
    """Refuse a batch without the columns that the config's loss of `role` reads."""
    needed = {"values", "returns"} if role == CRITIC else {"advantages"}
    if missing := sorted(needed - batch.columns.keys()):
        raise ConfigError(f"the batch has no column {' and '.join(missing)}, which the loss reads; call advantages() first")


def of_tokens(advantages: Sequence[float] | Tensor, batch: Batch) -> Tensor:
    """Advantages of responses or of tokens as a column."""
    values = torch.as_tensor(advantages, dtype=torch.float32)
    if values.shape == (len(batch),):
        values = values[:, None] * batch.mask
    if values.shape != batch.mask.shape:
        raise ConfigError(
            f"advantages has the shape {[*values.shape]}; it must be one number for each of {len(batch)} rows, or "
            f"{[*batch.mask.shape]}"
        )
    return values
