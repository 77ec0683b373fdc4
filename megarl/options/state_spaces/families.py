"""The families whose layers have state spaces, for `models/registry.py`."""

from __future__ import annotations

from megarl.options.state_spaces import granitemoehybrid, nemotron_h

ARCHITECTURES = (granitemoehybrid.ARCHITECTURE, nemotron_h.ARCHITECTURE)
