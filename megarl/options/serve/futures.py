"""Promises: requests that are answered later, how clients wait for them, and how long their answers are kept.

Everything here is used in one event loop. Answers are bytes as they are sent.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.options.serve.values import RequestError
from megarl.options.serve.wire import PROTOBUF

JSON = "application/json"
INLINE_BYTES = 1 << 16
"""Bytes of an answer that is sent without a word about its size first."""
MOST_COMPLETIONS = 4096
PROMISE_BYTES = 1024
"""Bytes of a promise beside its answer, about."""
UNSURE_S = 60.0
STOPPED_S = 0.5
"""How long a question for an answer waits where none will come any more."""
Category = Literal["user", "server", "unknown"]
Target = tuple[str, int]
"""A sampling session, and which of its clones."""


@dataclass
class Promise:
    """A request that is answered later. `tenant`: whose it is; `model`: of a training request; `target`: of a sample."""

    id: str
    tenant: str
    digest: bytes
    model: str = ""
    target: Target | None = None
    made: float = 0.0
    settled: float | None = None
    fetched: float | None = None
    content: bytes = b""
    media: str = JSON
    failed: bool = False
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a training request is durable, or is not taken after all."""
    cancel: Callable[[], Any] | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True)
class Reply:
    """A reply of HTTP."""

    content: bytes
    status: int = 200
    media: str = JSON


class _Queue:
    """Completed requests of a target, in order; `moved` is set when there is more."""

    def __init__(self) -> None:
        self.events: deque[tuple[int, Promise]] = deque()
        self.last = self.waiting = 0
        self.moved = asyncio.Event()

    def add(self, promise: Promise) -> None:
        self.last += 1
        self.events.append((self.last, promise))
        self.moved.set()


class Promises:
    """All promises of a server."""

    def __init__(
        self,
        *,
        poll_s: float = 30.0,
        keep_s: float = 3_600.0,
        keep_fetched_s: float = 600.0,
        keep_bytes: int = 1 << 30,
        most_waiting: int = 100_000,
        most_of_tenant: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`poll_s`: how long a client waits at most. Answers are kept `keep_s`, once fetched `keep_fetched_s`.

        `most_of_tenant`: of the requests that wait at once, so that the others of `most_waiting` are left to other tenants.
        """
        self._poll_s, self._keep_s, self._keep_fetched_s, self._keep_bytes = poll_s, keep_s, keep_fetched_s, keep_bytes
        self._most_waiting, self._clock = most_waiting, clock
        self._promises: dict[str, Promise] = {}
        self._queues: dict[Target, _Queue] = {}
        self._bytes = 0
        self._most_of_tenant = most_waiting if most_of_tenant is None else most_of_tenant
        self._waiting: Counter[str] = Counter()
        self._stopped = False

    def check_room(self, tenant: str) -> None:
        """Refuse one promise more where too many wait, of all tenants or of this one.

        Raises:
            RequestError: with status 429, at which clients ask again.
        """
        waiting = self._waiting.total()
        if waiting >= self._most_waiting:
            raise RequestError(f"{waiting} requests wait already, as many as this server takes; ask again later", status=429)
        if self._waiting[tenant] >= self._most_of_tenant:
            raise RequestError(
                f"{self._waiting[tenant]} requests of {tenant} wait already, as many as this server takes of a tenant; "
                "ask again later",
                status=429,
            )

    def make(self, identity: str, tenant: str, digest: bytes, *, model: str = "", target: Target | None = None) -> Promise:
        """Make a promise under a new id."""
        assert identity not in self._promises, identity
        promise = Promise(identity, tenant, digest, model, target, self._clock())
        self._promises[identity] = promise
        self._waiting[tenant] += 1
        return promise

    def known(self, identity: str) -> Promise | None:
        """The promise of that id, if it is kept."""
        return self._promises.get(identity)

    def unsure(self, model: str) -> list[Promise]:
        """Answers to a model's requests that its client may not have: not fetched, or so lately that the reply may be lost."""
        now = self._clock()
        own = (promise for promise in self._promises.values() if promise.model == model and promise.settled is not None)
        return [promise for promise in own if promise.fetched is None or now - promise.fetched < UNSURE_S]

    def keep(self, promise: Promise, answer: Mapping[str, Any] | bytes) -> None:
        """Settle a promise with its answer: JSON, or bytes of protobuf."""
        if isinstance(answer, bytes):
            self._settle(promise, answer, PROTOBUF)
        else:
            self._settle(promise, json.dumps(answer).encode(), JSON)

    def fail(self, promise: Promise, sentence: str, category: Category = "user") -> None:
        """Settle a promise with an error, which is final."""
        promise.failed = True
        self._settle(promise, json.dumps({"error": sentence, "category": category}).encode(), JSON)

    def settle_again(self, promise: Promise, content: bytes, media: str, *, failed: bool) -> None:
        """Settle a promise as it was before the server was started again."""
        promise.failed = failed
        self._settle(promise, content, media)

    def _settle(self, promise: Promise, content: bytes, media: str) -> None:
        if promise.settled is not None:
            return
        promise.content, promise.media, promise.settled = content, media, self._clock()
        self._bytes += _size(promise)
        self._waiting[promise.tenant] -= 1
        promise.moved.set()
        for end in promise.at_end:
            end()
        promise.at_end.clear()
        if promise.target is not None:
            self._queues.setdefault(promise.target, _Queue()).add(promise)

    def take_back(self, promise: Promise) -> None:
        """Forget a promise that nobody was told of."""
        del self._promises[promise.id]
        self._waiting[promise.tenant] -= 1
        for end in promise.at_end:
            end()

    def find(self, tenant: str, identity: str) -> Promise:
        """The tenant's promise of that id.

        Raises:
            RequestError: with status 410, at which clients send the request again that it was made for.
        """
        promise = self._promises.get(identity)
        if promise is None or promise.tenant != tenant:
            raise RequestError(f"request {identity:.200} is not known, or its answer has expired", status=410)
        return promise

    async def answer(self, tenant: str, identity: str, *, allow_metadata: bool) -> Reply:
        """Wait for an answer, as long as one poll may take.

        Raises:
            RequestError: as `find`.
        """
        promise = self.find(tenant, identity)
        if promise.settled is None:  # clients ask again at once, also a server that ends
            await (asyncio.sleep(STOPPED_S) if self._stopped else _wait(promise.moved, self._poll_s))
            promise = self.find(tenant, identity)  # it may have been forgotten meanwhile
        if promise.settled is None:
            again = {"type": "try_again", "request_id": identity, "queue_state": "active"}
            return Reply(json.dumps(again).encode(), 408)
        if allow_metadata and not promise.failed and len(promise.content) > INLINE_BYTES:
            size = {"status": "complete_metadata", "request_id": identity, "response_payload_size": len(promise.content)}
            return Reply(json.dumps(size).encode())
        promise.fetched = self._clock()
        return Reply(promise.content, 200, promise.media)

    async def completions(
        self, tenant: str, target: Target, cursor: int, timeout_s: float | None, retrieved: Sequence[str]
    ) -> dict[str, Any]:
        """Return what has been completed of a target behind `cursor`; waits for something, `timeout_s` at most."""
        for identity in retrieved:
            promise = self._promises.get(identity)
            if promise is not None and promise.tenant == tenant and promise.target == target and promise.settled is not None:
                self._forget(promise)
        queue = self._queues.setdefault(target, _Queue())
        while queue.events and queue.events[0][0] <= cursor:
            queue.events.popleft()
        wait_s = self._poll_s if timeout_s is None else max(0.0, min(timeout_s, self._poll_s))
        if not queue.events and wait_s and not self._stopped:
            queue.moved.clear()
            queue.waiting += 1
            await _wait(queue.moved, wait_s)
            queue.waiting -= 1
        if not queue.last and not queue.waiting:  # else whatever is asked for stays
            self._queues.pop(target, None)
        found = [(number, promise) for number, promise in queue.events if number > cursor][:MOST_COMPLETIONS]
        completions: list[dict[str, Any]] = [
            {"state": "failed", "request_id": promise.id}
            if promise.failed
            else {
                "state": "finished",
                "request_id": promise.id,
                "response_payload_uncompressed_size": len(promise.content),
            }
            for _, promise in found
        ]
        return {"completions": completions, "cursor": found[-1][0] if found else cursor}

    def cancel(self, tenant: str, identity: str) -> None:
        """End a request that can be cancelled and whose answer nobody wants; any other id is left alone."""
        promise = self._promises.get(identity)
        if promise is not None and promise.tenant == tenant and promise.settled is None and promise.cancel is not None:
            promise.cancel()
            self.fail(promise, "the request was cancelled by its client")

    def expire(self) -> None:
        """Forget answers that were kept long enough, and some of who has most of them where all have too many bytes."""
        now = self._clock()
        settled = [promise for promise in self._promises.values() if promise.settled is not None]
        for promise in settled:
            since_fetched = now - promise.fetched if promise.fetched is not None else -1.0
            if since_fetched > self._keep_fetched_s or now - (promise.settled or now) > self._keep_s:
                self._forget(promise)
        if self._bytes > self._keep_bytes:
            self._shrink()

    def _shrink(self) -> None:
        """Forget answers of the tenants that have the most bytes of them, those that were fetched first."""
        settled = [promise for promise in self._promises.values() if promise.settled is not None]
        settled.sort(key=lambda promise: (promise.fetched is None, promise.fetched or promise.settled or 0.0))
        answers: dict[str, deque[Promise]] = {}
        sizes: Counter[str] = Counter()
        for promise in settled:
            answers.setdefault(promise.tenant, deque()).append(promise)
            sizes[promise.tenant] += _size(promise)
        while self._bytes > self._keep_bytes:
            tenant = max(sizes, key=lambda name: sizes[name])
            promise = answers[tenant].popleft()
            sizes[tenant] -= _size(promise)
            self._forget(promise)

    def drop_target(self, session: str) -> None:
        """Forget what has been completed of a sampling session."""
        for target in [target for target in self._queues if target[0] == session]:
            self._queues.pop(target).moved.set()

    def stop(self) -> None:
        """End all waiting, now and from now on: clients ask again, this server or the next."""
        self._stopped = True
        for promise in self._promises.values():
            promise.moved.set()
        for queue in self._queues.values():
            queue.moved.set()

    def _forget(self, promise: Promise) -> None:
        if self._promises.pop(promise.id, None) is None:
            return
        self._bytes -= _size(promise)
        promise.content = b""
        queue = self._queues.get(promise.target) if promise.target is not None else None
        while queue is not None and queue.events and queue.events[0][1].id not in self._promises:
            queue.events.popleft()


def _size(promise: Promise) -> int:
    """Bytes that an answer takes while it is kept."""
    return len(promise.content) + PROMISE_BYTES


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
