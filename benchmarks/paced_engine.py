"""An embedded engine whose decoding steps take as long as they are told, however many responses are under way, as on a GPU
whose memory bounds them; so other work on the machine hardly changes what is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from megarl.config.engine_kinds import EMBEDDED, EngineCapabilities
from megarl.rollout.engines.embedded import EmbeddedEngine

STEP_S = 0.05


class PacedEngine(EmbeddedEngine):
    """Two requests of 32 responses at once, a token of each in `STEP_S` seconds."""

    capabilities: ClassVar[EngineCapabilities] = replace(EMBEDDED, batch_samples=32)

    def _wait_for_weights(self, call: Any) -> None:
        self._turn.wait(timeout=STEP_S)
        super()._wait_for_weights(call)
