"""A reward model in a run: it scores every response, or every step of one."""

from __future__ import annotations

from typing import Any

from megarl.config import Config
from megarl.options.reward_model.scores import ModelRewards
from megarl.options.reward_model.section import reward_model_of


def take_part(config: Config, tokenizer: Any) -> ModelRewards | None:
    """The scores of the reward model, if there is one."""
    settings = reward_model_of(config)
    return ModelRewards(settings, tokenizer) if settings.path is not None else None
