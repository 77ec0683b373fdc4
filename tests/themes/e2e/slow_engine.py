"""An embedded engine that takes its time over some groups, so that they are still under way when a step has what it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar
from zlib import crc32

from megarl.config.engine_kinds import EMBEDDED, EngineCapabilities
from megarl.rollout.engines.embedded import EmbeddedEngine


class SlowEngine(EmbeddedEngine):
    """Two groups at once, of four responses each; every third group waits before each of its tokens."""

    capabilities: ClassVar[EngineCapabilities] = replace(EMBEDDED, batch_samples=4)

    def _wait_for_weights(self, call: Any) -> None:
        if crc32(call.rows[0].key.encode()) % 3 == 0:
            self._turn.wait(timeout=0.25)  # which lets the others go on
        super()._wait_for_weights(call)
