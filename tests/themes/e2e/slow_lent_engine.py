"""An embedded engine that takes its time over every token, so that the trainer waits for samples while lent engines work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from megarl.config.engine_kinds import EMBEDDED, EngineCapabilities
from megarl.rollout.engines.embedded import EmbeddedEngine


class SlowEngine(EmbeddedEngine):
    """Two groups at once, of four responses each."""

    capabilities: ClassVar[EngineCapabilities] = replace(EMBEDDED, batch_samples=4)

    def _wait_for_weights(self, call: Any) -> None:
        self._turn.wait(timeout=0.1)
        super()._wait_for_weights(call)
