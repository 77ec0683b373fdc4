"""The embedded engine as one that gets other weights in the middle of responses."""

from __future__ import annotations

from typing import Any

import torch

from megarl.rollout.engines.embedded import EmbeddedEngine

SCALE = 0.1
"""Standard deviation of what the new weights add."""


class TurningEngine(EmbeddedEngine):
    """Gets other weights, as version 1, after its third pass."""

    passes = 0

    def _wait_for_weights(self, *given: Any) -> None:
        self.passes += 1
        if self.passes == 4:
            generator = torch.Generator().manual_seed(2)
            for weight in self._held.values():
                weight.add_(SCALE * torch.randn(weight.shape, generator=generator).to(weight.dtype))
            self._weights.begin(1, None)
            self._weights.receive()
            self._weights.check(1)
            self._weights.confirm()
            self._weights_epoch += 1
        super()._wait_for_weights(*given)
