"""GLM-5: DeepSeek-V3.2's attention, of which some layers take the choices of an earlier one.

Indexer and attention rotate neighbouring pairs.
"""

from __future__ import annotations

from megarl.options.sparse_attention.sparse_family import sparse_family

ARCHITECTURE = sparse_family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    defaults={"index_n_heads": 32, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
    rotates_pairs=True,
    shares_choices=True,
)
