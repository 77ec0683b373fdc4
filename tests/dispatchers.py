"""megatron-core's token dispatchers of a process, which keep the graph of the last pass.

That graph holds the model and its process groups, each of which has a thread that wakes ten times a second; and as it is C++,
no collection finds the circle. A run has one model for good. Ranks of tests have hundreds, one after the other.
"""

from __future__ import annotations

import weakref
from typing import Any

MADE: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_track() -> None:
    """Remember all dispatchers that are made from now on."""
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    make = MoETokenDispatcher.__init__

    def make_and_remember(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        MADE.add(self)

    MoETokenDispatcher.__init__ = make_and_remember  # type: ignore[method-assign]


def let_graphs_go() -> None:
    """Drop what dispatchers keep of graphs."""
    for dispatcher in MADE:
        for name, value in vars(dispatcher).items():
            if getattr(value, "grad_fn", None) is not None:
                setattr(dispatcher, name, None)
