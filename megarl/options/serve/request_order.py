"""Orders of requests: those of a model by their numbers, however they arrive; those of all by turns of tenants and clients."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from megarl.options.serve.values import RequestError

J = TypeVar("J")
MOST_KNOWN = 100_000
"""Numbers of a model whose contents are remembered; a request that comes again later than that is refused."""


class Lane(Generic[J]):
    """Requests of one model, by number. Each number takes effect once, after all before it."""

    def __init__(self, first: int = 0) -> None:
        """`first` is the number that is next."""
        self.next = first
        self._waiting: dict[int, tuple[J, float]] = {}
        self._digests: OrderedDict[int, bytes] = OrderedDict()

    def is_repeated(self, seq: int, digest: bytes) -> bool:
        """Return whether the request came before; if not, it must be offered.

        Raises:
            RequestError: another one came with that number, or it is too old to be known.
        """
        known = self._digests.get(seq)
        if known is None and seq < self.next:
            raise RequestError(f"seq_id is {seq}, but the model's next is {self.next}; it must not be used again")
        if known is not None and known != digest:
            raise RequestError(f"seq_id is {seq}, which came before with other content; it must not be used again")
        return known is not None

    def offer(self, seq: int, digest: bytes, job: J, now: float) -> list[J]:
        """Take a request that `is_repeated` has not known; returns those whose turn has come, in order.

        Raises:
            RequestError: those behind it have had their turn meanwhile.
        """
        if seq < self.next:
            raise RequestError(f"request {seq} came too late, as the model's next is {self.next}")
        self.remember(seq, digest)
        self._waiting[seq] = job, now
        ready = []
        while self.next in self._waiting:
            ready.append(self._waiting.pop(self.next)[0])
            self.next += 1
        return ready

    def remember(self, seq: int, digest: bytes) -> None:
        """Know a request when it comes again."""
        self._digests[seq] = digest
        while len(self._digests) > MOST_KNOWN:
            self._digests.popitem(last=False)

    def forget(self, seq: int) -> None:
        """Take back a `remember`: the request was not taken, and may come again."""
        self._digests.pop(seq, None)

    def overdue(self, now: float, longest_s: float) -> tuple[list[J], int]:
        """Requests that have waited longer than that for one before them, which are taken out, and the number of that one.

        What comes later with a number below theirs is refused.
        """
        if not self._waiting or now - min(since for _, since in self._waiting.values()) <= longest_s:
            return [], self.next
        missing, jobs = self.next, [self._waiting[seq][0] for seq in sorted(self._waiting)]
        self.next = max(self._waiting) + 1
        self._waiting.clear()
        return jobs, missing

    def take_all(self) -> list[J]:
        """Take out all that wait."""
        jobs = [self._waiting[seq][0] for seq in sorted(self._waiting)]
        self._waiting.clear()
        return jobs


class FairQueue(Generic[J]):
    """Jobs by tenant and client: tenants take turns, in each of them its clients, and each one's jobs stay in their order.

    Used in one event loop.
    """

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, OrderedDict[Hashable, deque[J]]] = OrderedDict()
        self._last: tuple[str, Hashable] = ("", None)
        self._more = asyncio.Event()

    def put(self, tenant: str, client: Hashable, job: J) -> None:
        """Add a job behind the client's others."""
        self._jobs.setdefault(tenant, OrderedDict()).setdefault(client, deque()).append(job)
        self._more.set()

    async def take(self, goes_on: Callable[[J], bool | None] = lambda job: None) -> J:
        """Wait for the next job.

        Of the client that was served last, the first job of which `goes_on` says True or False (None: it is about another
        matter) comes before all turns if that is True.
        """
        while not self._jobs:
            self._more.clear()
            await self._more.wait()
        clients_of_last = self._jobs.get(self._last[0], OrderedDict())
        for place, job in enumerate(clients_of_last.get(self._last[1], ())):
            if (found := goes_on(job)) is not None:
                if found:
                    return self._taken(*self._last, place)
                break
        tenant = next(iter(self._jobs))
        self._last = (tenant, next(iter(self._jobs[tenant])))
        return self._taken(*self._last, 0)

    def _taken(self, tenant: str, client: Hashable, place: int) -> J:
        clients = self._jobs[tenant]
        jobs = clients[client]
        job = jobs[place]
        del jobs[place]
        _move_back(clients, client, is_empty=not jobs)
        _move_back(self._jobs, tenant, is_empty=not clients)
        return job


class FairSlots:
    """So many places for requests that run at once; the tenant with the fewest in them is next, and of it such a client.

    Used in one event loop.
    """

    def __init__(self, most: int) -> None:
        self._most, self._taken = most, 0
        self._by_tenant: Counter[str] = Counter()
        self._by_client: Counter[Hashable] = Counter()
        self._waiting: OrderedDict[str, OrderedDict[Hashable, deque[asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, tenant: str, client: Hashable) -> AsyncIterator[None]:
        """Wait for a place, and keep it within."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, OrderedDict()).setdefault(client, deque()).append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come
                self._free(tenant, client)
            raise
        try:
            yield
        finally:
            self._free(tenant, client)

    def _free(self, tenant: str, client: Hashable) -> None:
        self._taken -= 1
        self._by_tenant[tenant] -= 1
        self._by_client[client] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        if not self._by_client[client]:
            del self._by_client[client]
        self._admit()

    def _admit(self) -> None:
        while self._taken < self._most and self._waiting:
            tenant = min(self._waiting, key=lambda name: self._by_tenant[name])
            clients = self._waiting[tenant]
            client = min(clients, key=lambda name: self._by_client[name])
            turn = clients[client].popleft()
            _move_back(clients, client, is_empty=not clients[client])
            _move_back(self._waiting, tenant, is_empty=not clients)
            if turn.cancelled():
                continue
            self._taken += 1
            self._by_tenant[tenant] += 1
            self._by_client[client] += 1
            turn.set_result(None)


def _move_back(line: OrderedDict[Any, Any], name: Any, *, is_empty: bool) -> None:
    """Put who was served behind the others, or out of the line."""
    line.move_to_end(name)
    if is_empty:
        del line[name]
