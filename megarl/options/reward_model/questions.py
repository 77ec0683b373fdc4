"""Answers of a reward model to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.questions import ConfiguredRole
from megarl.config.schema import Config
from megarl.options.reward_model.section import reward_model_of


def further_roles(config: Config) -> tuple[ConfiguredRole, ...]:
    """The reward model, if there is one."""
    model = reward_model_of(config)
    if model.path is None:
        return ()
    field = "reward_model.path"
    return (
        ConfiguredRole(
            "reward_model", model.path, field, model.layout, None, value_head=True, scores=True, megatron=model.megatron
        ),
    )


def further_folders(config: Config) -> dict[str, str]:
    """The reward model's folder, by the config field that names it."""
    path = reward_model_of(config).path
    return {} if path is None else {"reward_model.path": path}


def further_reward_weights(config: Config) -> dict[str, float]:
    """The weight of its scores in the sum of all rewards, by their label in `Sample.rewards`."""
    model = reward_model_of(config)
    return {} if model.path is None else {"reward_model": model.weight}


def gives_step_rewards(config: Config) -> bool:
    """Return whether every step of a response has a reward of its own."""
    model = reward_model_of(config)
    return model.path is not None and model.per_step
