"""Work at the routers of a role with experts while it computes: routes are replayed, loads are watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from torch import Tensor

from megarl.data.stream_sequences import TokenSequences
from megarl.megatron.router_watch import RouterWatch
from megarl.options.routing_replay.replay import RoutingReplay


class Routers(NamedTuple):
    """None: nothing is replayed, or nothing watched."""

    replay: RoutingReplay | None = None
    watch: RouterWatch | None = None

    @contextmanager
    def micro_batch(self, routes: Tensor | None, counted: TokenSequences | None) -> Iterator[None]:
        """Around the forward pass of a micro-batch whose tokens have these `routes`, and of which these are `counted`."""
        replayed = self.replay.forward(routes) if self.replay is not None else nullcontext()
        watched = self.watch.micro_batch(counted) if self.watch is not None and counted is not None else nullcontext()
        with replayed, watched:
            yield
