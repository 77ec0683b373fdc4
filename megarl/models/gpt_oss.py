"""gpt-oss: attention with sinks, through a window in every other layer, and experts of clamped SwiGLU; biases everywhere.

The hub stores the experts' matrices as MXFP4, which are read as bfloat16 (`options/few_bits/mxfp4.py`), and written as that.
"""

from __future__ import annotations

from typing import Any

from megarl.models import dense, moe
from megarl.models.architecture import Architecture, HFConfig, HubNames, SglangFacts
from megarl.models.fused_experts import FusedExperts
from megarl.models.hf_fields import refuse, with_defaults, without_mxfp4
from megarl.models.packings import Copy
from megarl.models.rope import rope_refusal
from megarl.models.weight_map import Rule, WeightMap
from megarl.models.windows import FULL, SLIDING, sliding_layers

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
    found = with_defaults(without_mxfp4(hf_config), DEFAULTS)
    found["sliding_window"] = hf_config.get("sliding_window", WINDOW)
    if not found.get("layer_types"):
        found["layer_types"] = [(FULL, SLIDING)[(n + 1) % 2] for n in range(int(found.get("num_hidden_layers") or 0))]
    if not found.get("rope_parameters") and not found.get("rope_scaling"):
        found["rope_scaling"] = DEFAULT_ROPE
    return found


def transformer_config_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """The dense decoder with sinks, windows and biases, and experts whose gate is x * sigmoid(1.702 x), clamped, times up + 1.

    Raises:
        ModelError: another gate, no biases, or anything that the dense decoder refuses.
    """
    hf_config = text_config(hf_config)
    refuse(hf_config, "attention_bias", True, "megatron-core has biases on all of attention, experts and router, or on none")
    refuse(hf_config, "swiglu_alpha", ALPHA, "megatron-core's gate is x * sigmoid(1.702 x)")
    sizes, experts = dense.DenseSizes.from_hf(hf_config), _experts(hf_config)
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


def gpt_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    """Vocabulary, positions and tying."""
    hf_config = text_config(hf_config)
    return dense.gpt_kwargs(hf_config, dense.DenseSizes.from_hf(hf_config))


def weight_map(hf_config: HFConfig) -> WeightMap:
    """The common rules with biases, a sink for each head, and experts with biases."""
    hf_config = text_config(hf_config)
    sizes, experts = dense.DenseSizes.from_hf(hf_config), _experts(hf_config)
    attention = dense.attention_rules(sizes, bias=True, output_bias=True)
    attention.append(
        Rule(
            dense.LAYER + "self_attention.core_attention.softmax_offset",
            (dense.HF_LAYER + "self_attn.sinks",),
            Copy((sizes.num_heads,), axis=0),
        )
    )
    mlp = moe.mlp_rules(experts, sizes.hidden_size, hf_router="router", bias=True)
    return dense.weight_map(sizes, attention, mlp, num_experts=experts.num_experts)


def fused_experts(hf_config: HFConfig) -> FusedExperts:
    """The experts' sizes; rows of gate and up alternate, and each projection has a bias."""
    hf_config = text_config(hf_config)
    experts = _experts(hf_config)
    return FusedExperts(experts.num_experts, dense.DenseSizes.from_hf(hf_config).hidden_size, experts.expert_ffn_size, True)


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    layers, fields = range(dense.DenseSizes.from_hf(hf_config).num_layers), ("num_local_experts", "num_experts")
    return moe.MoeSizes.from_hf(hf_config, layers, experts_fields=fields, ffn_field="intermediate_size")


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    if hf_config.get("quantization_config"):
        return "it would hold MXFP4 experts, where updates are bfloat16; convert the folder with `megarl convert` first"
    return rope_refusal(hf_config)


ARCHITECTURE = Architecture(
    name="gpt_oss",
    hf_classes=("GptOssForCausalLM", "GptOssForSequenceClassification"),
    transformer_config_kwargs=transformer_config_kwargs,
    gpt_kwargs=gpt_kwargs,
    weight_map=weight_map,
    sglang=SglangFacts(refusal=_sglang_refusal, arguments={"moe_runner_backend": "triton"}),  # its default transposes experts
    hub=HubNames(alternating=True),
    text_config=text_config,
    fused_experts=fused_experts,
)
