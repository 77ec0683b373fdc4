"""Settings of tiny models: families of experts, and dense ones that differ from them in little else."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family
from tests.families.settings import HALF_ROPE, ODD_SIZES, WIDE_YARN

MINIMAX_M2 = {
    "head_dim": 12,
    "intermediate_size": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": HALF_ROPE,
}
ERNIE_MOE: dict[str, Any] = {
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 8,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "moe_norm_min": 0.55,  # more than some sums of scores, as in no published model
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
HUNYUAN = {"head_dim": 12, "rope_parameters": ALPHA}
HUNYUAN_MOE = HUNYUAN | {"num_experts": 8, "moe_topk": 3, "intermediate_size": 16}
SOLAR = {
    "head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "routed_scaling_factor": 1.5,
    "rope_parameters": WIDE_YARN,
}
AFMOE = {
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 8,
    "route_scale": 1.5,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "mup_enabled": True,
}
FAMILIES: dict[str, Family] = {
    "minimax_m2": Family("MiniMaxM2", MINIMAX_M2, 8),
    "ernie4_5": Family("Ernie4_5", {"head_dim": 12, "rope_parameters": WIDE_YARN, "tie_word_embeddings": True}),
    "ernie4_5_moe": Family("Ernie4_5_Moe", ERNIE_MOE, 8),
    "hunyuan_v1_dense": Family("HunYuanDenseV1", HUNYUAN),
    "hunyuan_v1_moe": Family("HunYuanMoEV1", HUNYUAN_MOE, 8),
    "solar_open": Family("SolarOpen", SOLAR, 8),
    "afmoe": Family("Afmoe", AFMOE, 8),
}
VARIANTS: dict[str, Family] = FAMILIES | {
    "minimax_m2-tied": Family(
        "MiniMaxM2",
        MINIMAX_M2
        | {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-2}
        | {"rope_parameters": WIDE_YARN | {"partial_rotary_factor": 0.5}},
        8,
    ),
    "ernie4_5-biases": Family("Ernie4_5", {"use_bias": True, "head_dim": None, "num_key_value_heads": None}),
    "ernie4_5_moe-interval": Family(
        "Ernie4_5_Moe",
        ERNIE_MOE
        | {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_num_shared_experts": 0}
        | {"moe_norm_min": 1e-12, "tie_word_embeddings": True},
        8,
    ),
    "hunyuan_v1_dense-tied": Family(
        "HunYuanDenseV1", {"head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1, "rope_parameters": WIDE_YARN}
    ),
    "hunyuan_v1_moe-lists": Family(
        "HunYuanMoEV1", HUNYUAN_MOE | {"moe_topk": [3] * 4, "tie_word_embeddings": True, "rope_parameters": WIDE_YARN}, 8
    ),
    "solar_open-grouped": Family(
        "SolarOpen",
        SOLAR
        | {"attention_bias": True, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
        8,
    ),
    "afmoe-tied": Family(
        "Afmoe",
        AFMOE
        | {"num_dense_layers": 2, "num_shared_experts": 2, "layer_types": None, "global_attn_every_n_layers": 2}
        | {"mup_enabled": False, "tie_word_embeddings": True, "num_key_value_heads": 1, "sliding_window": 256}
        | {"rope_parameters": WIDE_YARN},
        8,
    ),
}
ODD: dict[str, Family] = {
    "minimax_m2-odd": Family("MiniMaxM2", MINIMAX_M2 | ODD_SIZES | {"num_local_experts": 6, "intermediate_size": 9}, 6),
    "ernie4_5_moe-odd": Family(
        "Ernie4_5_Moe",
        ERNIE_MOE
        | {name: ODD_SIZES[name] for name in ODD_SIZES if name != "head_dim"}
        | {"moe_num_experts": 6, "moe_intermediate_size": 9},
        6,
    ),
    "hunyuan_v1_dense-odd": Family("HunYuanDenseV1", HUNYUAN | ODD_SIZES),
    "hunyuan_v1_moe-odd": Family("HunYuanMoEV1", HUNYUAN_MOE | ODD_SIZES | {"num_experts": 6, "intermediate_size": 9}, 6),
    "afmoe-odd": Family("Afmoe", AFMOE | ODD_SIZES | {"num_experts": 6, "moe_intermediate_size": 9, "layer_types": None}, 6),
}
