"""The family with these layers, for `models/registry.py`."""

from __future__ import annotations

from megarl.options.gemma4 import gemma4_text

ARCHITECTURES = (gemma4_text.ARCHITECTURE,)
