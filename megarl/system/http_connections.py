"""Connections of megarl's HTTP servers: uvicorn's protocol, with time limits for what a client sends and takes.

uvicorn limits the size of a header and the time between requests. It waits without end for the rest of a header or body, and
for a client that does not read its answer; and at its limit of connections it refuses everybody. Here the connection that
moved nothing for the longest time makes room, so that a new client is served while others hold connections open.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
from dataclasses import dataclass
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

MOST_CONNECTIONS = 8192
LEAST_CONNECTIONS = 16
YOUNG_S = 0.5
"""Of a connection that is ended for another one only when there is no other room: its client had no time to say anything."""
LEAST_BYTES = 10 << 10
"""Of a body or an answer that must move in `Patience.stall_s`, as long as there is more."""


@dataclass(frozen=True)
class Patience:
    """Seconds that a server waits for a client."""

    head_s: float = 10.0
    """From the first byte of a request, or from the connection, to the end of its header."""
    stall_s: float = 10.0
    """In which `LEAST_BYTES` of a body must come, or of an answer be taken."""
    refused_s: float = 5.0
    """For the rest of a body that was answered before it was read; it is thrown away."""
    look_s: float = 0.5
    """Between two looks at a connection."""


class WatchedProtocol(H11Protocol):
    """A connection that is ended when its client is too slow, or when it is the quietest and room is needed."""

    patience = Patience()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, and end another where there are as many as the server may have."""
        super().connection_made(transport)
        self._phase, self._of = "head", self.cycle
        self._made_at = self._moved_at = self.loop.time()
        self._due = self._moved_at + self.patience.head_s
        self._moved = self._unsent = 0
        self._timer = self.loop.call_later(self.patience.look_s, self._look)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency * 3 // 4:
            self._make_room(self.limit_concurrency)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look at it no longer."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        self._moved_at = self.loop.time()
        super().data_received(data)
        self._note(len(data))

    def resume_writing(self) -> None:
        """The client has taken most of what waited for it."""
        super().resume_writing()
        self._moved_at = self.loop.time()
        self._note(LEAST_BYTES)

    def _make_room(self, most: int) -> None:
        """End the connection that moved nothing for the longest time, of those that wait for their client."""
        all_of_them = cast("set[WatchedProtocol]", self.connections)
        others = [one for one in all_of_them if one is not self and one.now() != "ours"]
        if len(all_of_them) < most:
            others = [one for one in others if one._made_at < self.loop.time() - YOUNG_S]
        if others:
            quietest = min(others, key=lambda one: one._moved_at)
            self.connections.discard(quietest)
            quietest.transport.abort()

    def now(self) -> str:
        """Return what the connection waits for: a `head`, the rest of a `body`, a client that is `taking` its answer, the rest
        of a `refused` body, the next request (`idle`), or for the server (`ours`)."""
        if self.transport.get_write_buffer_size() > 0:
            return "taking"
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            return "body" if cycle.more_body and not self.flow.read_paused else "ours"
        if self.conn.their_state is h11.SEND_BODY:
            return "refused"
        return "head" if cycle is None or self.conn.trailing_data[0] else "idle"

    def _note(self, moved: int) -> None:
        """Set the time by which the client must have done its part: anew when that part is another one, or goes on well."""
        phase, cycle, now = self.now(), self.cycle, self.loop.time()
        self._moved += moved
        goes_on = phase in ("body", "taking") and self._moved >= LEAST_BYTES
        if (phase, cycle) != (self._phase, self._of) or goes_on:
            self._phase, self._of, self._moved = phase, cycle, 0
            patience = self.patience
            limits = {
                "head": patience.head_s,
                "body": patience.stall_s,
                "taking": patience.stall_s,
                "refused": patience.refused_s,
            }
            self._due = now + limits.get(phase, math.inf)  # uvicorn ends idle ones

    def _look(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        taken = max(0, self._unsent - unsent)
        self._unsent = unsent
        if taken:
            self._moved_at = self.loop.time()
        self._note(taken)
        if self.loop.time() >= self._due:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(self.patience.look_s, self._look)


def most_connections() -> int:
    """Connections that a server may have: a part is left of the descriptors that this process may still open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    left = allowed - len(os.listdir("/proc/self/fd"))
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, left * 3 // 4))
