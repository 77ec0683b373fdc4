"""Qwen3-VL-MoE: Qwen3-VL's tower before Qwen3-MoE's decoder, whose experts the hub stores together."""

from __future__ import annotations

from dataclasses import replace

from megarl.models import qwen3_moe
from megarl.models.architecture import HFConfig
from megarl.models.fused_experts import FusedExperts
from megarl.models.hf_fields import refuse
from megarl.options.pictures.qwen3_vl import vision_with
from megarl.options.pictures.seeing_family import seeing
from megarl.options.pictures.vision_config import TextConfig

DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "norm_topk_prob": True, "decoder_sparse_step": 1}
TEXT = TextConfig(DEFAULTS, tied_in_text=False)


def text_config(hf_config: HFConfig) -> HFConfig:
    """Qwen3-MoE's config.

    Raises:
        ModelError: the experts' weights of a token do not sum to one, as transformers has it whatever the config says.
    """
    config = TEXT(hf_config)
    refuse(config, "norm_topk_prob", True, "transformers computes no other weights for this family")
    return config


def fused_experts(hf_config: HFConfig) -> FusedExperts:
    """The experts' sizes."""
    kwargs = qwen3_moe.ARCHITECTURE.transformer_config_kwargs(text_config(hf_config))
    return FusedExperts(kwargs["num_moe_experts"], kwargs["hidden_size"], kwargs["moe_ffn_hidden_size"])


def _head_dim(hf_config: HFConfig) -> int:
    return int(qwen3_moe.ARCHITECTURE.transformer_config_kwargs(text_config(hf_config))["kv_channels"])


DEEPSTACK_OF_SGLANG = 3
"""Decoder layers behind which SGLang's model adds features, whatever the config says (0.5.23: models/qwen3_vl_moe.py)."""


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    layers = len(VISION(hf_config).deepstack)
    if layers == DEEPSTACK_OF_SGLANG:
        return OF_ALL.sglang.refusal(hf_config)
    return f"it adds features of the tower behind {DEEPSTACK_OF_SGLANG} decoder layers, and the model has {layers} such layers"


VISION = vision_with("Qwen3VLMoeVisionModel", _head_dim)
OF_ALL = seeing(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    qwen3_moe.ARCHITECTURE,
    text_config,
    VISION,
    prefixes=("model.visual.", "model.language_model."),
    fused_experts=fused_experts,
)
ARCHITECTURE = replace(OF_ALL, sglang=replace(OF_ALL.sglang, refusal=_sglang_refusal))
