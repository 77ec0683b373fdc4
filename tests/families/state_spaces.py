"""Tiny models with state spaces: Granite 4 hybrid and Nemotron-H."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family

MAMBA, ATTENTION = "linear_attention", "full_attention"
GRANITE: dict[str, Any] = {
    "layer_types": [MAMBA, ATTENTION, MAMBA, MAMBA],
    "intermediate_size": 8,
    "shared_intermediate_size": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 12,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.21,
    "logits_scaling": 0.7,
    "tie_word_embeddings": True,
}
DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope", "tie_word_embeddings": False}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["moe", MAMBA, ATTENTION, "mlp"],
    "head_dim": 12,
    "ssm_state_size": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "moe_latent_size": 20,
    "moe_shared_expert_intermediate_size": 12,
    "routed_scaling_factor": 2.5,
}
SPACES: dict[str, Any] = {"linear": True, "option": "state_spaces"}
FAMILIES: dict[str, Family] = {
    "granite_hybrid": Family("GraniteMoeHybrid", GRANITE, 4, **SPACES),
    "nemotron_h": Family("NemotronH", NEMOTRON, 8, **SPACES),
}
VARIANTS: dict[str, Family] = FAMILIES | {
    "granite_hybrid-dense": Family("GraniteMoeHybrid", GRANITE | DENSE | {"mamba_n_groups": 2}, **SPACES),
    "nemotron_h-plain": Family(
        "NemotronH",
        NEMOTRON
        | {"layers_block_type": [MAMBA, "mlp", MAMBA, ATTENTION], "n_groups": 4, "time_step_min": 0.7}
        | {"use_conv_bias": False, "num_key_value_heads": 4},  # and so many steps are clamped
        linear=True,
        option="state_spaces",
    ),
    "nemotron_h-direct": Family("NemotronH", NEMOTRON | {"moe_latent_size": None, "n_groups": 8}, 8, **SPACES),
}
ODD: dict[str, Family] = {
    "nemotron_h-odd": Family(
        "NemotronH",
        NEMOTRON
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "mamba_num_heads": 6, "n_routed_experts": 6}
        | {"moe_intermediate_size": 9},
        6,
        linear=True,
        option="state_spaces",
    ),
}


def hub_name(model_type: str, name: str) -> str:
    """What the hub calls a tensor of these families, whose experts are still together; others keep their name."""
    if model_type == "granitemoehybrid":
        return name.replace(".router.weight", ".router.layer.weight")
    return name.replace("model.", "backbone.", 1) if model_type == "nemotron_h" else name
