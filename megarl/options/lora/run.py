"""Options by which a role's model is loaded with its adapters."""

from __future__ import annotations

from typing import Any

from megarl.config import AnyConfig
from megarl.models.registry import load_hf_config
from megarl.options.lora.peft_header import lora_of
from megarl.runs.training_side import POLICY, REFERENCE


def model_options(config: AnyConfig, role: str) -> dict[str, Any]:
    """Fields of a role's `ModelOptions`: its adapters, or that it is the policy without what they have learnt."""
    if role == REFERENCE and config.reference.is_policy_as_it_began(config.policy, config.model.path):
        return {"begins": POLICY}
    trained, folder = next((one.trained, one.folder) for one in config.roles if one.name == role)
    if trained is None or not trained.has_adapters:
        return {}
    lora = lora_of(trained, load_hf_config(folder), f"{role}.lora")
    sends = role == POLICY and config.sends_adapters
    return {"lora": lora, "adapter": lora.folder, "lora_seed": config.run.seed, "sends_adapters": sends}
