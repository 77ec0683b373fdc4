"""The section `reward_model`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.layout_section import LayoutConfig
from megarl.config.option_sections import AddedField
from megarl.config.presets import ModelPart
from megarl.config.section import Section


class RewardModelConfig(Section):
    """A model with a scalar head that scores responses, in addition to or instead of `rewards`."""

    path: str | None = None
    """Hugging Face folder of the reward model. null: no reward model."""
    layout: LayoutConfig | None = None
    """Parallel layout of this model. null: it shares the policy's processes and layout."""
    freeze: Annotated[tuple[ModelPart, ...], Field(strict=False)] = ()
    """Parts of a vision-language model that are not trained: `vision` (the tower), `projector` (which makes tokens of its
    features), `language` (the decoder)."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig."""
    weight: float = 1.0
    """Weight of the reward model's score in the sum of all rewards."""
    per_step: bool = False
    """Score every step of a response (steps end with a newline), for `advantage: grpo_process`."""
    step_aggregation: Literal["mean", "min", "product", "last"] = "mean"
    """How the scores of steps become the score of a response, with `per_step`."""


DESCRIPTION = "A model with a scalar head that scores responses."
REWARD_MODEL = AddedField("Config", "reward_model", RewardModelConfig, RewardModelConfig(), DESCRIPTION)
FIELDS = (REWARD_MODEL,)
reward_model_of = REWARD_MODEL.of
"""The section `reward_model` of a run's config."""
