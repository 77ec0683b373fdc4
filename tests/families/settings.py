"""Settings of the tiny models: one of every family, variants of them, and some in sizes for worlds of three ranks."""

from __future__ import annotations

import math
from typing import Any

from tests.families.family import Family

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
YARN_AS_PUBLISHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WIDE_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
"""With the defaults that published configs leave out."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [1.0, 3.0, 5.0, 8.0, 13.0, 21.0],
    "original_max_position_embeddings": 64,
}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 64,
    "rope_parameters": YARN_ROPE,
}
GLM = {
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
KIMI = DEEPSEEK | {
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.827,
    "rope_parameters": YARN_ROPE | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0},
}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.21,
    "logits_scaling": 0.7,
    "rms_norm_eps": 1e-5,
}
LINEAR, FULL = "linear_attention", "full_attention"
DELTA_NET = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "rms_norm_eps": 1e-2,  # of what a token reads of a state hardly anything may be left, of which the norm makes noise
}
QWEN3_NEXT = DELTA_NET | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
    "mlp_only_layers": [1],
}
QWEN3_5_MOE = {name: value for name, value in QWEN3_NEXT.items() if name != "mlp_only_layers"}
WINDOW_IN_LAST = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
"""The last two of four layers have a window; both are shorter than most sequences of the tests."""
GPT_OSS = {
    "head_dim": 12,
    "intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_limit": 0.4,  # so that some are clamped
    "rope_parameters": WIDE_YARN | {"truncate": False},
}
ROPES = {
    "full_attention": WIDE_YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
"""By kind of layer; a base so small that the frequencies of tests' short sequences differ."""
OLMO3 = {"rms_norm_eps": 1e-5, "sliding_window": 6, "rope_parameters": ROPES}
GEMMA3 = {
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": ROPES | {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": Family("Mistral", {"head_dim": 12, "sliding_window": 6}),
    "qwen2": Family("Qwen2", WINDOW_IN_LAST | {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3", {"head_dim": 12, "num_key_value_heads": 1, "rope_parameters": WIDE_YARN}),
    "qwen3_5": Family("Qwen3_5", DELTA_NET, linear=True),
    "glm4": Family("Glm4", {"head_dim": 12, "attention_bias": True, "rope_parameters": HALF_ROPE}),
    "olmo2": Family("Olmo2", {"rms_norm_eps": 1e-5}),
    "olmo3": Family("Olmo3", OLMO3),
    "gemma3": Family("Gemma3", GEMMA3),
    "phi3": Family("Phi3", {"rope_parameters": HALF_ROPE}),
    "smollm3": Family("SmolLM3", {"no_rope_layers": [1, 0, 1, 0, 1, 1], "tie_word_embeddings": True}),
    "granite": Family("Granite", GRANITE),
    "seed_oss": Family("SeedOss", {"head_dim": 12}),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 4),
    "qwen3_moe": Family("Qwen3Moe", QWEN3_MOE | {"head_dim": 12, "norm_topk_prob": True}, 4),
    "deepseek_v3": Family("DeepseekV3", DEEPSEEK, 8),
    "glm4_moe": Family("Glm4Moe", GLM, 8),
    "qwen3_next": Family("Qwen3Next", QWEN3_NEXT, 8, linear=True),
    "kimi_k2": Family("DeepseekV3", KIMI, 8, "kimi_k2"),
    "gpt_oss": Family("GptOss", GPT_OSS, 4),
}
VARIANTS: dict[str, Family] = FAMILIES | {
    "llama-tied": Family("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 12}),
    "llama-rope-linear": Family("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-biases": Family("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama-rope-yarn": Family("Llama", {"head_dim": 12, "rope_parameters": YARN_ROPE | {"truncate": False}}),
    "llama-rope-longrope": Family("Llama", {"head_dim": 12, "rope_parameters": LONGROPE}),
    "mistral-full": Family("Mistral", {"sliding_window": None, "rope_parameters": WIDE_YARN | {"attention_factor": 0.8}}),
    "qwen2-full": Family("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-layer-types": Family(
        "Qwen2",
        WINDOW_IN_LAST
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mixtral-window": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}, 4),
    "qwen3_moe-window": Family("Qwen3Moe", QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 7}, 4),
    "glm4_moe-yarn": Family("Glm4Moe", GLM | {"rope_parameters": WIDE_YARN | {"partial_rotary_factor": 0.5}}, 8),
    "qwen3-tied": Family("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_moe-unnormalised": Family("Qwen3Moe", QWEN3_MOE | {"mlp_only_layers": [], "decoder_sparse_step": 2}, 4),
    "deepseek_v3-plain": Family(
        "DeepseekV3",
        DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "first_k_dense_replace": 0},
        8,
    ),
    "deepseek_v3-moonlight": Family(
        "DeepseekV3",
        DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "routed_scaling_factor": 2.446}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "rms_norm_eps": 1e-2},
        8,
    ),
    "glm4-tied": Family(
        "Glm4", {"attention_bias": False, "tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 1}
    ),
    "glm4-yarn": Family("Glm4", {"head_dim": 12, "rope_parameters": WIDE_YARN | {"partial_rotary_factor": 0.5}}),
    "olmo2-tied": Family("Olmo2", {"head_dim": 12, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "olmo3-published": Family(
        "Olmo3",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_theta": 5e5}
        | {"rope_scaling": YARN_AS_PUBLISHED | {"attention_factor": 0.1 * math.log(4.0) + 1}},
    ),
    "olmo3-default": Family(
        "Olmo3", {"sliding_window": 300, "head_dim": 12, "rope_parameters": ROPES, "num_key_value_heads": 1}
    ),
    "gemma3-untied": Family(
        "Gemma3", GEMMA3 | {"sliding_window": 256, "tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 16}
    ),
    "phi3-tied": Family("Phi3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "phi3-mini": Family(
        "Phi3",
        {"tie_word_embeddings": True, "max_position_embeddings": 512, "original_max_position_embeddings": 64}
        | {"rope_parameters": HALF_ROPE | {"rope_type": "longrope", "short_factor": [1.5, 3.0], "long_factor": [2.0, 21.0]}},
    ),
    "phi3-window": Family("Phi3", {"rope_parameters": HALF_ROPE, "sliding_window": 7}),
    "smollm3-interval": Family("SmolLM3", {"no_rope_layer_interval": 3, "tie_word_embeddings": False}),
    "smollm3-window": Family("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7}),
    "glm4_moe-grouped": Family(
        "Glm4Moe",
        GLM
        | {"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 2, "n_shared_experts": 2}
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "partial_rotary_factor": 0.67, "factor": 3.0}},
        8,
    ),
    "qwen3_5_moe": Family("Qwen3_5Moe", QWEN3_5_MOE, 8, linear=True),
    "qwen3_next-plain": Family(
        "Qwen3Next",
        QWEN3_NEXT
        | {"layer_types": None, "mlp_only_layers": [], "norm_topk_prob": False, "num_key_value_heads": 4}
        | {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True},
        8,
        linear=True,
    ),
}

ODD_SIZES: dict[str, Any] = {
    "hidden_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
ODD_LINEAR: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}
"""Of a model with linear attention, whose four layers keep their kinds."""
ODD: dict[str, Family] = {
    "llama-odd": Family("Llama", ODD_SIZES),
    "glm4-odd": Family("Glm4", ODD_SIZES | {"rope_parameters": HALF_ROPE}),
    "olmo2-odd": Family("Olmo2", ODD_SIZES),
    "gemma3-odd": Family("Gemma3", GEMMA3 | ODD_SIZES | {"layer_types": None, "sliding_window_pattern": 2}),
    "phi3-odd": Family("Phi3", ODD_SIZES | {"hidden_size": 48}),
    "kimi_k2-odd": Family(
        "DeepseekV3",
        KIMI
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 6}
        | {"moe_intermediate_size": 6, "rope_parameters": KIMI["rope_parameters"] | {"original_max_position_embeddings": 18}},
        6,
    ),
    "mistral-odd": Family("Mistral", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "sliding_window": 3}),
    "gpt_oss-odd": Family(
        "GptOss",
        GPT_OSS
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 6, "num_experts_per_tok": 3}
        | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "rope_parameters": WIDE_YARN, "swiglu_limit": 7.0},
        6,
    ),
    "granite-odd": Family("Granite", GRANITE | ODD_SIZES),
    "smollm3-odd": Family("SmolLM3", ODD_SIZES | {"no_rope_layers": [1, 0, 1, 1, 0]}),
    "glm4_moe-odd": Family(
        "Glm4Moe",
        GLM
        | {name: ODD_SIZES[name] for name in ODD_SIZES if name != "head_dim"}
        | {"n_routed_experts": 6}
        | {"moe_intermediate_size": 9},
        6,
    ),
    "qwen3_next-odd": Family(
        "Qwen3Next", QWEN3_NEXT | ODD_LINEAR | {"num_experts": 6, "moe_intermediate_size": 9}, 6, linear=True
    ),
    "qwen3_5-odd": Family("Qwen3_5", DELTA_NET | ODD_LINEAR, linear=True),
}
"""Sizes that three divides and two does not, for worlds of three ranks: 3 KV heads, 6 experts, 5 layers or 4."""
WIDE: dict[str, Family] = {
    "mixtral-wide": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}, 4),
    "kimi_k2-wide": Family("DeepseekV3", KIMI | {"moe_intermediate_size": 64}, 8, "kimi_k2"),
}
"""Whose experts have groups of 32 columns, on each of two ranks that share them, too."""
