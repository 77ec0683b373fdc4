"""The families that see, for `models/registry.py`."""

from __future__ import annotations

from megarl.options.pictures import glm4v_moe, kimi_k25, qwen2_5_vl, qwen2_vl, qwen3_omni_moe_thinker, qwen3_vl, qwen3_vl_moe

ARCHITECTURES = (
    qwen2_vl.ARCHITECTURE,
    qwen2_5_vl.ARCHITECTURE,
    qwen3_vl.ARCHITECTURE,
    qwen3_vl_moe.ARCHITECTURE,
    glm4v_moe.ARCHITECTURE,
    kimi_k25.ARCHITECTURE,
    qwen3_omni_moe_thinker.ARCHITECTURE,
)
