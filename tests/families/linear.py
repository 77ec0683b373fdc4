"""Tiny models with linear attention beside Qwen's: Kimi-Linear and OLMo hybrid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tests.families import compressed
from tests.families.family import Family

LINEAR, FULL = "linear_attention", "full_attention"
KIMI: dict[str, Any] = {
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 8,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "linear_head_dim": 6,
    "linear_num_heads": 4,
    "rms_norm_eps": 1e-2,  # of what a token reads of a state hardly anything may be left, of which the norm makes noise
}
OLMO: dict[str, Any] = {
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-2,
}
VALUES = ".linear_attn.v_proj."
"""OLMo hybrid norms what is read of states with an epsilon of its own, 1e-5, which counts where values are small; else float32
makes gradients of transformers that are off by up to 1.9e-5 of their float64 ones, with these sizes 4.6e-6."""
FAMILIES: dict[str, Family] = {
    "kimi_linear": Family("KimiLinear", KIMI, 8, linear=True),
    "olmo_hybrid": Family("OlmoHybrid", OLMO, linear=True, small=VALUES),
}
VARIANTS: dict[str, Family] = FAMILIES | {
    "kimi_linear-queries": Family(
        "KimiLinear",
        KIMI
        | {"layer_types": [FULL, LINEAR, LINEAR, FULL], "q_lora_rank": 20, "n_group": 2, "topk_group": 1}
        | {"num_experts_per_tok": 2, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
        | {"linear_conv_kernel_dim": 3, "linear_num_heads": 8, "n_shared_experts": 1},
        8,
        linear=True,
    ),
}
ODD: dict[str, Family] = {
    "olmo_hybrid-odd": Family(
        "OlmoHybrid",
        OLMO
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "linear_num_key_heads": 3, "linear_num_value_heads": 6}
        | {"hidden_size": 36},
        linear=True,
        small=VALUES,
    ),
    "kimi_linear-odd": Family(
        "KimiLinear",
        KIMI
        | {"num_attention_heads": 6, "num_key_value_heads": 6, "linear_num_heads": 3, "num_local_experts": 6}
        | {"moe_intermediate_size": 9},
        6,
        linear=True,
    ),
}


RENAMED = {
    ".self_attn.f_a_proj": ".self_attn.forget_gate.f_a_proj",
    ".self_attn.f_b_proj": ".self_attn.forget_gate.f_b_proj",
    ".block_sparse_moe.shared_experts.": ".mlp.shared_experts.",
    ".block_sparse_moe.experts": ".mlp.experts",
}
"""Parts of the hub's names of Kimi-Linear's linear layers, and transformers'."""


def hub_layer(model_type: str, layer: str) -> str:
    """What the hub calls a linear layer of these families, which transformers calls `layer`; others as they are."""
    if model_type == "deepseek_v4":
        return compressed.hub_name(f"{layer}.weight").removesuffix(".weight")
    for on_hub, theirs in RENAMED.items() if model_type == "kimi_linear" else ():
        layer = layer.replace(theirs, on_hub)
    return layer


def on_the_hub(config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors on the hub of a tensor of these families, whose experts are still together; others as they are."""
    if config.model_type == "kimi_linear":
        name = name.replace(".forget_gate.", ".")
        for block in ("experts", "gate", "shared_experts"):
            name = name.replace(f".mlp.{block}.", f".block_sparse_moe.{block}.")
        rows = [config.linear_num_heads * config.linear_head_dim] * 3
    elif config.model_type == "olmo_hybrid":
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        rows = [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]
        if name.startswith("model.layers.") and config.layer_types[int(name.split(".")[2])] == LINEAR:
            name = name.replace(".input_layernorm.", ".attention_layer_norm.")
            name = name.replace(".post_attention_layernorm.", ".feedforward_layer_norm.")
    else:
        rows = []
    if rows and name.endswith(".conv1d.weight"):
        for which, part in zip("qkv", tensor.split(rows), strict=True):
            yield name.replace("conv1d", f"{which}_conv1d"), part
    else:
        yield name, tensor
