"""Families whose queries attend to chosen keys: fewer than most sequences of the tests have.

Indexers have so many heads that no key's score is zero in all of them: which of equal scores transformers takes is not said.
"""

from __future__ import annotations

from typing import Any

from tests.families.family import Family
from tests.families.settings import DEEPSEEK

INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 5}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DEEPSEEK_V32 = DEEPSEEK | INDEXER
GLM_DSA = (
    DEEPSEEK
    | INDEXER
    | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "rope_parameters": PLAIN_ROPE, "rms_norm_eps": 1e-5}
    | {"indexer_types": ["full", "shared"] * 2}
)
FAMILIES: dict[str, Family] = {
    "deepseek_v32": Family("DeepseekV32", DEEPSEEK_V32, 8, option="sparse_attention"),
    "glm_moe_dsa": Family("GlmMoeDsa", GLM_DSA, 8, option="sparse_attention", follows=True),
}
VARIANTS: dict[str, Family] = FAMILIES | {
    "deepseek_v32-plain": Family(
        "DeepseekV32",
        DEEPSEEK_V32
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "rope_parameters": PLAIN_ROPE, "index_topk": 3}
        | {"index_head_dim": 4, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "tie_word_embeddings": True},
        8,
        option="sparse_attention",
    ),
    "glm_moe_dsa-offset": Family(
        "GlmMoeDsa",
        GLM_DSA | {"indexer_types": ["full", "full", "shared", "shared"], "index_topk": 8, "n_shared_experts": 1},
        8,
        option="sparse_attention",
        follows=True,
    ),
    "glm_moe_dsa-full": Family("GlmMoeDsa", GLM_DSA | {"indexer_types": None}, 8, option="sparse_attention"),
}
ODD: dict[str, Family] = {
    "glm_moe_dsa-odd": Family(
        "GlmMoeDsa",
        GLM_DSA
        | {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 6}
        | {"moe_intermediate_size": 6, "index_n_heads": 15, "index_topk": 7}
        | {"indexer_types": ["full", "full", "full", "shared", "full"]},
        6,
        option="sparse_attention",
    ),
}
