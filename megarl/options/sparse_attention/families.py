"""The families whose queries attend to chosen keys, for `models/registry.py`."""

from __future__ import annotations

from megarl.options.sparse_attention import deepseek_v32, glm_moe_dsa

ARCHITECTURES = (deepseek_v32.ARCHITECTURE, glm_moe_dsa.ARCHITECTURE)
