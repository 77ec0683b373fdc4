"""Tiny models whose layers with a window and without have attention of other sizes: Step 3.5, Gemma 4, MiMo-V2-Flash."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family
from tests.families.settings import LLAMA3_ROPE

FULL, WINDOW = "full_attention", "sliding_attention"
TWO_ROPES = {
    FULL: LLAMA3_ROPE | {"partial_rotary_factor": 0.5},
    WINDOW: {"rope_type": "default", "rope_theta": 300.0},
}
STEP: dict[str, Any] = {
    "pad_token_id": 0,  # which may not be null; tests take the embedding's own notice of it away
    "head_dim": 12,
    "num_sliding_attention_heads": 8,
    "sliding_window": 6,
    "layer_types": [FULL, WINDOW, WINDOW, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "rope_parameters": TWO_ROPES,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "share_expert_dim": 12,
    "moe_router_scaling_factor": 1.7,
    "swiglu_limits": [0.0, 0.3, 0.0, 0.2],
    "swiglu_limits_shared": [0.3, 0.0, 0.4, None],
}
"""Limits are so low that many gates and ups are at them."""
GEMMA4: dict[str, Any] = {
    "pad_token_id": 0,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "layer_types": [WINDOW, FULL, WINDOW, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "rms_norm_eps": 1e-2,
    "vocab_size_per_layer_input": 131,
    "final_logit_softcapping": 2.5,
    "tie_word_embeddings": True,
}
"""As the small sizes: inputs of layers, and two layers that take keys of others. Norms are of narrow vectors: with less
epsilon, and inputs 6 wide, transformers' own float32 gradients are off by 5e-5 of their float64 ones (of the odd model)."""
GEMMA4_MOE: dict[str, Any] = GEMMA4 | {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 8,
    "final_logit_softcapping": None,
    "tie_word_embeddings": False,
}
MIMO: dict[str, Any] = {
    "head_dim": 12,
    "v_head_dim": 10,
    "sliding_window": 6,
    "layer_types": [FULL, WINDOW, WINDOW, FULL],
    "rope_parameters": TWO_ROPES,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "routed_scaling_factor": 1.7,
    "attention_value_scale": 0.6,
}
FAMILIES: dict[str, Family] = {
    "step3p5": Family("Step3p5", STEP, 8),
    "mimo_v2": Family("MiMoV2Flash", MIMO, 8),
    "gemma4": Family("Gemma4", GEMMA4, option="gemma4"),
    "gemma4_moe": Family("Gemma4", GEMMA4_MOE, 8, option="gemma4"),
}
VARIANTS: dict[str, Family] = FAMILIES | {
    "step3p5-plain": Family(
        "Step3p5",
        STEP
        | {
            "layer_types": [FULL, FULL, FULL, WINDOW],
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 5,
            "swiglu_limits": None,
        }
        | {"num_sliding_attention_heads": None, "swiglu_limits_shared": None}
        | {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base} for kind, base in ((FULL, 5e3), (WINDOW, 1e4))
            }
        }
        | {"mlp_layer_types": None, "moe_layers_enum": "1,3"},
        8,
    ),
    "mimo_v2-plain": Family(
        "MiMoV2Flash",
        MIMO
        | {"layer_types": [FULL, FULL, FULL, WINDOW], "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
        | {"num_key_value_heads": 1, "v_head_dim": 14, "attention_value_scale": None, "tie_word_embeddings": True}
        | {"head_dim": 18, "rope_parameters": None, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
        8,
    ),
    "gemma4-values": Family(
        "Gemma4",
        GEMMA4
        | {"layer_types": [FULL, WINDOW, WINDOW, FULL], "num_kv_shared_layers": 1, "use_double_wide_mlp": False}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 4},
        option="gemma4",
    ),
    "gemma4-inputs": Family(
        "Gemma4",
        GEMMA4
        | {"num_kv_shared_layers": 0, "num_key_value_heads": 1, "tie_word_embeddings": False}
        | {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base} for kind, base in ((FULL, 5e3), (WINDOW, 1e4))
            }
        },
        option="gemma4",
    ),
}
ODD: dict[str, Family] = {
    "step3p5-odd": Family(
        "Step3p5",
        STEP
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "num_sliding_attention_heads": 9}
        | {"n_routed_experts": 6, "moe_intermediate_size": 9, "layer_types": [FULL, WINDOW, WINDOW, WINDOW, FULL]}
        | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"], "head_dim": 8}
        | {"swiglu_limits": [0, 0, 0.2, 0, 0.3], "swiglu_limits_shared": [0, 0.4, 0, 0.3, 0]},
        6,
    ),
    "mimo_v2-odd": Family(
        "MiMoV2Flash",
        MIMO
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "v_head_dim": 9}
        | {"n_routed_experts": 6, "moe_intermediate_size": 9, "layer_types": [FULL, WINDOW, WINDOW, WINDOW, FULL]}
        | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"]},
        6,
    ),
    "gemma4-odd": Family(
        "Gemma4",
        GEMMA4
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3}
        | {"layer_types": [FULL, WINDOW, WINDOW, WINDOW, FULL]},
        option="gemma4",
    ),
    "gemma4_moe-odd": Family(
        "Gemma4",
        GEMMA4_MOE
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 3}
        | {"num_experts": 6, "moe_intermediate_size": 9, "layer_types": [FULL, WINDOW, WINDOW, WINDOW, FULL]},
        6,
        option="gemma4",
    ),
}


def hub_name(model_type: str, name: str) -> str:
    """What the hub calls a tensor of these families, whose experts are still together; others keep their name."""
    if model_type == "mimo_v2_flash":
        return name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias")
    if model_type != "step3p5":
        return name
    name = name.replace(".mlp.shared_experts.", ".share_expert.").replace(
        ".mlp.gate.e_score_correction_bias", ".moe.router_bias"
    )
    return name.replace(".mlp.gate.", ".moe.gate.").replace(".mlp.experts.", ".moe.experts.")
