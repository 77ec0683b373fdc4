"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the keys that each layer's own indexer chooses.

The indexer rotates the halves of its rotary part against each other, though attention rotates neighbouring pairs.
"""

from __future__ import annotations

from megarl.options.sparse_attention.sparse_family import sparse_family

ARCHITECTURE = sparse_family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    defaults={"index_n_heads": 64, "n_group": 8, "topk_group": 4, "rms_norm_eps": 1e-6},
    rotates_pairs=False,
    shares_choices=False,
)
