"""What an architecture's file provides: names, and three functions of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.models.weight_map import WeightMap

HFConfig = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A model family. The functions take the dict of `config.json` and raise ModelError for what they cannot represent."""

    name: str
    """`model_type` in config.json."""
    hf_classes: tuple[str, ...]
    """What `architectures` in config.json may name: the causal LM, and the reward model with a scalar head."""
    transformer_config_kwargs: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of TransformerConfig, with `activation` a name that the megatron room translates."""
    gpt_kwargs: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of GPTModel; `vocab_size` is without padding."""
    weight_map: Callable[[HFConfig], WeightMap]
    """Hugging Face tensors to Megatron parameters, both ways."""
