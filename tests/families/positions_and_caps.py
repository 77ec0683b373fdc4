"""Settings of tiny models whose queries are scaled by position, whose scores are capped, or whose layers are alike."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family
from tests.families.settings import LLAMA3_ROPE

SCALED_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 5,  # so that queries of most tokens of the tests are scaled, and by several factors
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
ODD_SIZES: dict[str, Any] = {
    "hidden_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
FULL, WINDOW = "full_attention", "sliding_attention"
KINDS = [WINDOW, WINDOW, FULL, WINDOW]
EXAONE: dict[str, Any] = {"rms_norm_eps": 1e-5, "sliding_window": 6, "layer_types": KINDS}
"""Whose third layer has no positions."""
EXAONE_AS_PUBLISHED: dict[str, Any] = EXAONE | {
    "head_dim": 12,
    "sliding_window_pattern": "LLG",
    "rope_theta": 1e6,  # SGLang has no other
    "rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
}
EXAONE_MOE: dict[str, Any] = EXAONE | {
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
}
GEMMA2: dict[str, Any] = {
    "head_dim": 12,
    "query_pre_attn_scalar": 3,
    "sliding_window": 6,
    "attn_logit_softcapping": 0.7,
    "final_logit_softcapping": 2.5,
    "tie_word_embeddings": True,
}
"""Whose caps are so low that most scores and many logits are bent."""
LITE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
"""Latent attention and experts, for GLM-4.7-Flash and Mistral Small 4."""
MISTRAL4: dict[str, Any] = LITE | {
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.4,
    "rope_parameters": SCALED_ROPE | {"original_max_position_embeddings": 8, "partial_rotary_factor": 0.4},
}
"""The table of angles that megatron-core makes has as many as the original positions, which context parallelism must divide."""
LLAMA4: dict[str, Any] = {
    "head_dim": 12,
    "intermediate_size": 16,
    "intermediate_size_mlp": 24,
    "num_local_experts": 4,
    "moe_layers": [1, 3],
    "attention_chunk_size": 7,
    "no_rope_layers": [1, 1, 0, 1],
    "floor_scale": 4,
    "attn_scale": 0.4,
    "rope_parameters": LLAMA3_ROPE,
}
FAMILIES: dict[str, Family] = {
    "ministral3": Family("Ministral3", {"head_dim": 12, "rope_parameters": SCALED_ROPE}),
    "exaone4": Family("Exaone4", EXAONE | {"head_dim": 12}),
    "exaone_moe": Family("ExaoneMoe", EXAONE_MOE, 8),
    "gemma2": Family("Gemma2", GEMMA2),
    "glm4_moe_lite": Family("Glm4MoeLite", LITE | {"num_nextn_predict_layers": 0, "rms_norm_eps": 1e-2}, 8),
    "mistral4": Family("Mistral4", MISTRAL4, 8),
    "llama4": Family("Llama4", LLAMA4, 4),
}
VARIANTS: dict[str, Family] = FAMILIES | {
    "ministral3-window": Family(
        "Ministral3",
        {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 6, "tie_word_embeddings": True}
        | {"rope_parameters": SCALED_ROPE | {"rope_type": "linear"}},
    ),
    "exaone4-published": Family("Exaone4", EXAONE_AS_PUBLISHED),
    "exaone_moe-grouped": Family(
        "ExaoneMoe",
        EXAONE_MOE
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "sliding_window": 300}
        | {"mlp_layer_types": None, "num_shared_experts": 1, "routed_scaling_factor": 1.3, "num_key_value_heads": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        8,
    ),
    "mistral4-plain": Family(
        "Mistral4",
        MISTRAL4
        | {"norm_topk_prob": False, "q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 2}
        | {"rope_parameters": MISTRAL4["rope_parameters"] | {"mscale": 0.7}},
        8,
    ),
    "gemma2-uncapped": Family(
        "Gemma2",
        GEMMA2
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False}
        | {"num_key_value_heads": 1, "layer_types": KINDS, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    ),
    "llama4-plain": Family(
        "Llama4",
        {"intermediate_size": 16, "head_dim": 8, "num_local_experts": 4, "use_qk_norm": False, "attn_temperature_tuning": False}
        | {"no_rope_layer_interval": 2, "attention_chunk_size": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
        4,
    ),
    "exaone4-full": Family("Exaone4", {"sliding_window": None, "layer_types": [FULL] * 4, "tie_word_embeddings": True}),
}
ODD: dict[str, Family] = {
    "ministral3-odd": Family("Ministral3", ODD_SIZES | {"rope_parameters": SCALED_ROPE}),
    "exaone_moe-odd": Family(
        "ExaoneMoe",
        EXAONE_MOE
        | ODD_SIZES
        | {"num_experts": 6, "moe_intermediate_size": 9, "mlp_layer_types": None, "layer_types": None}
        | {"first_k_dense_replace": 2, "sliding_window_pattern": 2},
        6,
    ),
    "glm4_moe_lite-odd": Family(
        "Glm4MoeLite",
        LITE
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 6}
        | {"moe_intermediate_size": 6, "num_nextn_predict_layers": 0},
        6,
    ),
    "mistral4-odd": Family(
        "Mistral4",
        MISTRAL4
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 6}
        | {"moe_intermediate_size": 6}
        | {"rope_parameters": MISTRAL4["rope_parameters"] | {"original_max_position_embeddings": 6}},
        6,
    ),
    "llama4-odd": Family(
        "Llama4",
        LLAMA4
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 6, "intermediate_size": 18}
        | {"attention_chunk_size": 4, "interleave_moe_layer_step": 2, "moe_layers": None},
        6,
    ),
    "gemma2-odd": Family("Gemma2", GEMMA2 | ODD_SIZES),
    "exaone4-odd": Family("Exaone4", ODD_SIZES | {"sliding_window": 6, "sliding_window_pattern": 2}),
}
