"""gpt-oss: attention with sinks, through a window in every other layer, and experts of clamped SwiGLU; biases everywhere.

The hub stores the experts' matrices as MXFP4, which are read as bfloat16 (`options/few_bits/mxfp4.py`), and written as that.
"""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import HFConfig, HubNames, SglangFacts
from megarl.models.fused_experts import FusedExperts
from megarl.models.hf_fields import refuse, size, without_mxfp4
from megarl.models.packings import Copy
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.models.windows import sliding_layers, with_windows

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64, "attention_bias": True, "swiglu_limit": 7.0}
"""transformers' defaults that differ from those of other families."""
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
WINDOW = 128
ALPHA = 1.702


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing, and without what says that experts are MXFP4."""
    filled = with_windows(without_mxfp4(hf_config), DEFAULTS, WINDOW, pattern=2)
    if not filled.get("rope_parameters") and not filled.get("rope_scaling"):
        filled["rope_scaling"] = DEFAULT_ROPE
    return filled


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder with sinks, windows and biases, and experts whose gate is x * sigmoid(1.702 x), clamped, times up + 1.

    Raises:
        ModelError: another gate, no biases, or anything that the dense decoder refuses.
    """
    refuse(hf_config, "attention_bias", True, "megatron-core has biases on all of attention, experts and router, or on none")
    refuse(hf_config, "swiglu_alpha", ALPHA, "megatron-core's gate is x * sigmoid(1.702 x)")
    experts = moe.in_every_layer(hf_config)
    return (
        dense.transformer_config_kwargs(hf_config, sizes, sliding_layers(hf_config))
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | moe.softmax_router_kwargs(experts, normalised=True)
        | {
            "softmax_type": "learnable",
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "activation": "quick_gelu",
            "activation_func_clamp_value": float(hf_config["swiglu_limit"]),
            "glu_linear_offset": 1.0,
        }
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The common rules with biases, a sink for each head, and experts with biases."""
    experts, sinks = moe.in_every_layer(hf_config), Copy((sizes.num_heads,), axis=0)
    name, hf_name = "self_attention.core_attention.softmax_offset", "self_attn.sinks"
    attention = dense.attention_rules(sizes, bias=True, output_bias=True)
    attention.append(Rule(dense.LAYER + name, (dense.HF_LAYER + hf_name,), sinks))
    mlp = moe.mlp_rules(experts, sizes.hidden_size, hf_router="router", bias=True)
    return dense.weight_map(sizes, attention, mlp, num_experts=experts.num_experts)


def fused_experts(hf_config: HFConfig) -> FusedExperts:
    """The experts' sizes; rows of gate and up alternate, and each projection has a bias."""
    experts, hidden_size = moe.in_every_layer(hf_config), size(hf_config, "hidden_size")
    return FusedExperts(experts.num_experts, hidden_size, experts.expert_ffn_size, alternating=True)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if hf_config.get("quantization_config"):
        return "it would hold MXFP4 experts, where updates are bfloat16; convert the folder with `megarl convert` first"
    return None


ARCHITECTURE = text_family(
    "gpt_oss",
    ("GptOssForCausalLM", "GptOssForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    sglang=SglangFacts(arguments={"moe_runner_backend": "triton"}),  # its default transposes experts
    refusal=_sglang_refusal,
    hub=HubNames(alternating=True),
    fused_experts=fused_experts,
)
