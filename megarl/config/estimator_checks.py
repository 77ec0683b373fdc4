"""Checks of the advantage estimator against the fields that it reads or leaves unread: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.schema import Config
from megarl.errors import ConfigError, describe_value
from megarl.option_list import functions


def check_estimator(config: Config) -> None:
    """Raise ConfigError for the first field that the estimator contradicts."""
    algorithm, needed = config.algorithm, config.algorithm.estimator_needs
    estimator = f"algorithm.advantage = '{algorithm.advantage}'"
    if needed.group and config.rollout.samples_per_prompt < 2:
        reason = f"gives {estimator} no two responses of a prompt to compare"
        raise config.refusal("rollout.samples_per_prompt", reason, allowed="at least 2")
    for argument in needed.arguments:
        value = algorithm.advantage_args.get(argument.name)
        if argument.below_group and value is not None and value >= config.rollout.samples_per_prompt:
            allowed = f"less than rollout.samples_per_prompt = {config.rollout.samples_per_prompt}"
            raise config.refusal(f"algorithm.advantage_args.{argument.name}", allowed=allowed)
    if needed.step_rewards and not any(gives(config) for gives in functions("questions", "gives_step_rewards")):
        remedy = "set reward_model.path and reward_model.per_step, or choose another algorithm.advantage"
        raise ConfigError.needs(estimator, "a reward model that scores every step", remedy)
    if needed.turn_states and config.rollout.episode.kind in ("single", "tools"):
        remedy = "set rollout.episode.kind to 'environment', or choose another algorithm.advantage"
        raise ConfigError.needs(estimator, "the state before each turn, which an environment names", remedy)
    if needed.sources:
        reason = f"changes the sum of the rewards, and {estimator} reads each of them by itself"
        _check_unshaped(config, ("overlong_tokens", "length_penalty", "normalise", "clip"), reason)
    if needed.step_rewards or needed.turn_rewards:
        parts = "steps" if needed.step_rewards else "turns"
        reason = f"is for the reward of a response, and {estimator} reads those of {parts}"
        _check_unshaped(config, ("normalise", "clip"), reason)


def _check_unshaped(config: Config, fields: tuple[str, ...], reason: str) -> None:
    default = AlgorithmConfig().shaping
    for field in fields:
        if getattr(config.algorithm.shaping, field) != (unset := getattr(default, field)):
            raise config.refusal(f"algorithm.shaping.{field}", reason, allowed=describe_value(unset))
