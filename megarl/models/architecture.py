"""What an architecture's file provides: names, three functions of a Hugging Face config, and what others make of the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.models.fused_experts import FusedExperts
from megarl.models.vision import Vision
from megarl.models.weight_map import WeightMap

HFConfig = dict[str, Any]


def _serves(hf_config: HFConfig) -> str | None:
    return None


@dataclass(frozen=True)
class SglangFacts:
    """What SGLang makes of a family, where it is not what it makes of most."""

    replicates_attention: bool = False
    """Whether an engine can hold several replicas of the attention (SGLang's DP attention)."""
    refusal: Callable[[HFConfig], str | None] = _serves
    """Why SGLang cannot serve a model of this config, or cannot be given its weights; None: it can."""
    padded_heads: Callable[[HFConfig], int] = lambda hf_config: 0
    """Heads of the tower that its servers pad to a multiple of their ranks, between those that they are sent; 0: none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What its servers are started with, so that they hold weights where they are sent; `rollout.engine_args` wins."""


@dataclass(frozen=True)
class HubNames:
    """What checkpoints on the hub call an expert's gate, up and down projection, and the block that holds the experts."""

    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    block: str = "mlp"


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
    sglang: SglangFacts = field(default_factory=SglangFacts)
    hub: HubNames = field(default_factory=HubNames)
    text_config: Callable[[HFConfig], HFConfig] = lambda hf_config: hf_config
    """The decoder's part of the config, with the fields that text families read."""
    vision: Callable[[HFConfig], Vision | None] = lambda hf_config: None
    """What a config says of the tower; None of a family that only reads."""
    other_names: tuple[tuple[str, str], ...] = ()
    """What names of tensors begin with in folders that the hub does not have, and in those of the hub; the first one counts."""
    fused_experts: Callable[[HFConfig], FusedExperts] | None = None
    """How the hub stores experts, where it does not store each one's tensors as the weight map calls them."""
