"""The adapters that the engines of a run add themselves, read from its config."""

from __future__ import annotations

from megarl.config import Config
from megarl.models.lora import Lora
from megarl.models.peft_header import lora_of
from megarl.models.registry import load_hf_config


def engine_adapters(config: Config) -> Lora | None:
    """The adapters that are sent to engines, which keep the model's own weights; None: weights are sent.

    Raises:
        ModelError: `policy.lora.adapter` is no folder of adapters of this model.
    """
    if not config.sends_adapters:
        return None
    return lora_of(config.policy.lora, load_hf_config(config.model.path), "policy.lora")
