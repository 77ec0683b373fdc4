"""Choices that are allowed and that a run should not make without knowing: one sentence each, said when a run starts."""

from __future__ import annotations

from megarl.config.optimizer import OptimizerConfig
from megarl.config.schema import Config

WIDEST_SEQUENCE_CLIP = 0.02
"""An ε above this never clips a ratio that is a mean over a response: it stays within a few thousandths of 1."""


def notices(config: Config) -> list[str]:
    """Defaults in `config` that a run may well keep, but should not keep without knowing."""
    rate = config.critic.optimizer.lr
    if not config.uses_critic or rate != OptimizerConfig().lr:
        return []
    return [
        f"critic.optimizer.lr is {rate:g}, its default, whatever policy.optimizer.lr is; a new value head often learns too "
        "slowly with that: 1e-5 is usual"
    ]


def doubtful_choices(config: Config) -> list[str]:
    """Doubtful choices in `config`, and what to set instead."""
    algorithm, rollout, doubts = config.algorithm, config.rollout, []
    by, _ = rollout.schedule.continues_by
    continues_by = f"{by} = {getattr(rollout.schedule, by)!r}"
    if rollout.schedule.mode != "sync" and not algorithm.rollout_correction and not algorithm.loss_needs.pairs:
        doubts.append(
            f"rollout.schedule.mode = '{rollout.schedule.mode}' trains tokens of older weights as if the policy had sampled "
            "them; set algorithm.rollout_correction, such as {mode: tis_token}"
        )
    elif rollout.schedule.continues and not algorithm.rollout_correction and not rollout.schedule.mask_older_tokens:
        doubts.append(
            f"rollout.schedule.{continues_by} trains tokens of older weights as if the policy had sampled them; "
            "set algorithm.rollout_correction, such as {mode: tis_token}, or rollout.schedule.mask_older_tokens: true"
        )
    updates = config.optimizer_steps_per_step
    if updates > 1 and not algorithm.loss_needs.ratio and not algorithm.loss_needs.pairs:
        doubts.append(
            f"algorithm.policy_loss = '{algorithm.policy_loss}' is right for the first of a step's {updates} updates only; "
            "choose a loss with a ratio, such as 'clip', or set algorithm.mini_batches and algorithm.epochs to 1"
        )
    if updates == 1 and algorithm.loss_needs.needs_updates and not algorithm.bypasses_old_log_probs:
        doubts.append(
            f"algorithm.policy_loss = '{algorithm.policy_loss}' has no gradient from its penalty in the first of a step's "
            "updates, and a step has one; set algorithm.mini_batches or algorithm.epochs above 1"
        )
    limits = [f"rollout.{name} = {value}" for name, value in rollout.sampling_limits.items()]
    if limits and (rollout.schedule.mode != "sync" or rollout.schedule.continues):
        by = continues_by if rollout.schedule.continues else f"mode = '{rollout.schedule.mode}'"
        doubts.append(
            f"with rollout.schedule.{by} the tokens that {' and '.join(limits)} kept are those of "
            "older weights, and log-probs are over what the trainer's own keep; leave them out, or train in turns"
        )
    if algorithm.loss_needs.sequence_ratio and algorithm.clip_high > WIDEST_SEQUENCE_CLIP:
        doubts.append(
            f"algorithm.clip_high = {algorithm.clip_high} never clips the sequence ratio of algorithm.policy_loss = "
            f"'{algorithm.policy_loss}'; it is meant to be about 4e-4"
        )
    return doubts
