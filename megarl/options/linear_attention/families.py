"""The families whose layers have gated delta nets, for `models/registry.py`."""

from __future__ import annotations

from megarl.options.linear_attention import kimi_linear, olmo_hybrid, qwen3_5_moe_text, qwen3_5_text, qwen3_next

ARCHITECTURES = (
    qwen3_next.ARCHITECTURE,
    qwen3_5_text.ARCHITECTURE,
    qwen3_5_moe_text.ARCHITECTURE,
    kimi_linear.ARCHITECTURE,
    olmo_hybrid.ARCHITECTURE,
)
