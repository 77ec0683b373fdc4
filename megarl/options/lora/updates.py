"""Weight updates with adapters merged in that engines could not take."""

from __future__ import annotations

from megarl.config.sections import PolicyConfig
from megarl.errors import ConfigError, EngineError
from megarl.models.registry import architecture_for, load_hf_config
from megarl.models.weight_map import WeightMap
from megarl.options.lora.peft_header import lora_of
from megarl.options.lora.section import OUTPUT
from megarl.options.lora.weight_map import unties

_SENTENCE = (
    "policy.lora.sync is 'merged', but the model's output layer shares its weight with the embedding, and what engines are "
    f"sent would change both; it must be 'adapters', or policy.lora.targets must be without '{OUTPUT}'"
)


def check_merged(weight_map: WeightMap) -> None:
    """Refuse an output layer of its own for engines whose output layer is the embedding; `weight_map` is the policy's.

    Raises:
        EngineError: the model's output layer is tied and has an adapter.
    """
    if unties(weight_map):
        raise EngineError(_SENTENCE)


def check_policy(policy: PolicyConfig, folder: str) -> None:
    """Refuse the same before anything starts; `folder` has the model.

    Raises:
        ConfigError: the model's output layer is tied and has an adapter.
        ModelError: the model's config or the adapters cannot be read.
    """
    hf_config = load_hf_config(folder)
    family = architecture_for(hf_config)
    lora = lora_of(policy, hf_config, "policy.lora")
    if unties(lora.with_adapters(family.weight_map(hf_config), family.rows_together(hf_config))):
        raise ConfigError(_SENTENCE)
