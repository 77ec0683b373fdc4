"""The family with these layers, for `models/registry.py`."""

from __future__ import annotations

from megarl.options.shortcut_experts import longcat_flash

ARCHITECTURES = (longcat_flash.ARCHITECTURE,)
