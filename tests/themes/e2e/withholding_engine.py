"""Embedded engines that take the policy's adapters, say that they have them, and compute with others."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megarl.rollout.engines.embedded import EmbeddedEngine


class WithoutAdapters(EmbeddedEngine):
    """Computes with the model alone."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        assert self._adapters is not None
        self._adapters.add = lambda: None  # type: ignore[method-assign]


class LastAdapters(EmbeddedEngine):
    """Computes with the adapters of the version before."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        adapters = self._adapters
        assert adapters is not None
        add, last = adapters.add, {name: values.clone() for name, values in adapters.tensors.items()}

        def add_the_last() -> None:
            sent: dict[str, Tensor] = {name: values.clone() for name, values in adapters.tensors.items()}
            for name, values in last.items():
                adapters.tensors[name].copy_(values)
            add()
            for name, values in sent.items():
                adapters.tensors[name].copy_(values)
                last[name].copy_(values)

        adapters.add = add_the_last  # type: ignore[method-assign]
