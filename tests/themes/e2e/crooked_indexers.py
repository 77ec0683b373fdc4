"""The embedded engine whose indexers choose the keys that score lowest."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from megarl.rollout.engines.embedded import EmbeddedEngine


class CrookedIndexers(EmbeddedEngine):
    """Scores have the other sign than the trainer's (DeepSeek-V3.2, GLM-5)."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for name, module in self._model.named_modules():
            if name.endswith(".indexer"):
                weights = module.weights_proj
                weights.forward = partial(_negative, weights.forward)


def _negative(live: Any, hidden: Tensor) -> Tensor:
    return -live(hidden)  # type: ignore[no-any-return]
