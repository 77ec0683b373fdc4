"""Turns of tenants at the engines: so many samples at once, and the tenant with the fewest of them under way is next.

So a tenant's ten requests do not wait behind another one's ten thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator


class TenantTurns:
    """At most `most` samples at once, more only where a single request has more. Used in one event loop."""

    def __init__(self, most: int) -> None:
        self.most, self.under_way = most, 0
        self._of_tenant: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()
        """By tenant its requests in their order; who was served last stands last."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, samples: int) -> AsyncIterator[None]:
        """Wait for the turn of a request with so many samples, and keep it within."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((mine, samples))
        self._admit()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # its turn had come
                self._end(tenant, samples)
            self._admit()
            raise
        try:
            yield
        finally:
            self._end(tenant, samples)
            self._admit()

    def _end(self, tenant: str, samples: int) -> None:
        self.under_way -= samples
        self._of_tenant[tenant] -= samples
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def _admit(self) -> None:
        while (tenant := self._next()) is not None:
            future, samples = self._waiting[tenant][0]
            if self.under_way and self.under_way + samples > self.most:
                return
            self._waiting[tenant].popleft()
            self._waiting.move_to_end(tenant)
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            self.under_way += samples
            self._of_tenant[tenant] += samples
            future.set_result(None)

    def _next(self) -> str | None:
        """The waiting tenant with the fewest samples under way; of several the one that was served longest ago."""
        for tenant, requests in [*self._waiting.items()]:
            while requests and requests[0][0].done():  # cancelled
                requests.popleft()
            if not requests:
                del self._waiting[tenant]
        return min(self._waiting, key=lambda tenant: self._of_tenant[tenant], default=None)
