"""Checks of the section `reward_model`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.megatron_options import check_megatron
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.reward_model.section import reward_model_of


def check(config: Config) -> None:
    """Refuse how steps become a score where no steps are scored, and fields that megatron-core does not have."""
    model = reward_model_of(config)
    check_megatron("reward_model.megatron", model.megatron, is_trained=False)
    if model.step_aggregation != "mean" and not model.per_step:
        remedy = "set reward_model.per_step, or remove reward_model.step_aggregation"
        raise ConfigError.needs("reward_model.step_aggregation", "a reward model that scores every step", remedy)
