"""The family whose attention is compressed, for `models/registry.py`."""

from __future__ import annotations

from megarl.options.compressed_attention import deepseek_v4

ARCHITECTURES = (deepseek_v4.ARCHITECTURE,)
