"""Tiny models with two attentions in each layer, and a mixture beside the first MLP: LongCat-Flash."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family
from tests.families.settings import YARN_ROPE

LONGCAT: dict[str, Any] = {
    "num_hidden_layers": 8,  # attentions, of 4 layers
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "moe_topk": 4,
    "expert_ffn_hidden_size": 8,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 64,
    "rope_parameters": YARN_ROPE,
}
FAMILIES: dict[str, Family] = {"longcat_flash": Family("LongcatFlash", LONGCAT, 8, option="shortcut_experts")}
VARIANTS: dict[str, Family] = FAMILIES | {
    "longcat_flash-plain": Family(
        "LongcatFlash",
        LONGCAT | {"zero_expert_num": 0, "rope_parameters": None, "tie_word_embeddings": True, "max_position_embeddings": 256},
        8,
        option="shortcut_experts",
    ),
}
ODD: dict[str, Family] = {
    "longcat_flash-odd": Family(
        "LongcatFlash",
        LONGCAT
        | {"num_hidden_layers": 10, "num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 6}
        | {"zero_expert_num": 3, "expert_ffn_hidden_size": 9, "max_position_embeddings": 96},
        6,
        option="shortcut_experts",
    ),
}
