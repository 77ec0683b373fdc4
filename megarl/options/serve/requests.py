"""Requests of models on their way in: each is durable before its client hears that it was taken, and then waits for its turn.

A client does not send a training request again once it was taken, so whatever happens to the server, the next one does it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.errors import CheckpointError
from megarl.options.serve.futures import Promise, Promises
from megarl.options.serve.tenants import HeldBytes, Tenant, Tenants
from megarl.options.serve.values import RequestError
from megarl.options.serve.worker import OVERDUE, REFUSED, ClientModel, TrainerWorker, TrainingJob, Work, answering, redo_kind

if TYPE_CHECKING:
    from megarl.options.serve.journal import RequestJournal


class ModelRequests:
    """Gives requests of `models` to the worker, by numbers. Used in one event loop."""

    def __init__(
        self,
        models: Mapping[str, ClientModel],
        worker: TrainerWorker,
        promises: Promises,
        tenants: Tenants,
        held: HeldBytes,
        journal: RequestJournal | None,
    ) -> None:
        self._models, self._worker, self._promises, self._journal = models, worker, promises, journal
        self._tenants, self._held = tenants, held
        self.check_open: Callable[[str, str], None] = lambda tenant, model: None
        """Raises RequestError where a tenant's model is gone with its session."""

    async def submit(
        self,
        tenant: Tenant,
        identity: str,
        seq: int | None,
        digest: bytes,
        work: Work,
        redo: bytes,
        *,
        facts: Mapping[str, Any] | None = None,
        size: int = 0,
    ) -> dict[str, Any]:
        """Give a request to its model's lane; returns the future that the client gets.

        `redo` is what the work is made of after a crash; `facts` begin the journal of a new model; `size`: bytes of `work`.

        Raises:
            RequestError: with status 429, too many wait, or 503, the journal cannot be written: the client asks again.
        """
        model = self._models.get(identity)
        if model is None or model.lost:
            self.check_open(tenant.name, identity)
        if model is None or model.tenant != tenant.name:
            return self.refused(tenant, identity, absent(None, identity))
        if seq is None or seq < 0:
            return self.refused(tenant, identity, "seq_id must be a number, 1 for a model's first request and so on")
        future = {"request_id": f"{model.id}:{seq}", "model_id": model.id}
        try:
            is_repeated = model.lane.is_repeated(seq, digest)
            known = self._promises.known(future["request_id"])
            if is_repeated and known is None:
                raise RequestError(f"seq_id {seq} was answered before, and the answer is no longer kept")
            if not is_repeated and model.lost:
                raise RequestError(model.lost)
        except RequestError as error:
            return self.refused(tenant, identity, str(error))
        if known is not None:
            await known.taken.wait()
            if self._promises.known(known.id) is not known:
                raise _not_written()
            return future
        self._promises.check_room(tenant.name)
        free = self._held.take(tenant, size)
        try:
            self._tenants.usage.begin(tenant)
        except RequestError:
            free()
            raise
        promise = self._promises.make(future["request_id"], tenant.name, digest, model=model.id)
        promise.at_end += [partial(self._tenants.usage.end, tenant), free]
        model.used = time.monotonic()
        model.lane.remember(seq, digest)
        await self._write(model, seq, promise, work.kind, redo, facts)
        self.offer(model, seq, digest, promise, work)
        return future

    async def _write(
        self, model: ClientModel, seq: int, promise: Promise, kind: str, redo: bytes, facts: Mapping[str, Any] | None
    ) -> None:
        """Have the journal on disk before a request counts as taken."""
        try:
            if self._journal is not None and not model.lost:
                entry = (seq, redo_kind(kind, promise.digest), redo)
                await self._worker.on_disk(partial(_write, self._journal, model.id, entry, facts))
        except (OSError, CheckpointError, RuntimeError) as error:  # the last: the server ends
            if not model.lost:  # else it was dropped meanwhile, which the request is told in its turn
                model.lane.forget(seq)
                self._promises.take_back(promise)
                self._worker.say(f"request {seq} of model {model.id} is not taken: {error}")
                raise _not_written() from None
        finally:
            promise.taken.set()

    def offer(self, model: ClientModel, seq: int, digest: bytes, promise: Promise, work: Work) -> None:
        """Let a request that is in the journal wait for its turn."""
        job = TrainingJob(model, seq, digest, promise, work)
        try:
            for ready in model.lane.offer(seq, digest, job, time.monotonic()):
                self._worker.put(ready)
        except RequestError as error:
            self._promises.fail(promise, str(error))

    async def refuse(
        self, tenant: Tenant, model: str, seq: int | None, digest: bytes, sentence: str, *, kind: str = REFUSED
    ) -> dict[str, Any]:
        """Answer a request that cannot be: it fails in its turn, so that those behind it are not waited for."""
        return await self.submit(tenant, model, seq, digest, refusal(sentence, kind), sentence.encode())

    def refused(self, tenant: Tenant, what: str, sentence: str) -> dict[str, Any]:
        """A promise of its own that has failed."""
        self._promises.check_room(tenant.name)
        promise = self._promises.make(f"refused:{secrets.token_hex(12)}:-1", tenant.name, b"")
        self._promises.fail(promise, sentence)
        return {"request_id": promise.id, "model_id": what}

    def skip_overdue(self, longest_s: float) -> None:
        """Refuse requests that have waited longer than that for one before them."""
        for model in self._models.values():
            jobs, missing = model.lane.overdue(time.monotonic(), longest_s)
            for job in jobs:
                sentence = f"request {job.seq} waited {longest_s:.0f} s for request {missing} of its model, which did not come"
                job.work = refusal(sentence, OVERDUE)
                self._worker.put(job)


def _write(journal: RequestJournal, model: str, entry: tuple[int, str, bytes], facts: Mapping[str, Any] | None) -> None:
    if facts is not None:
        journal.begin(model, facts, [entry])
    else:
        journal.append(model, *entry)
        journal.flush()


def _not_written() -> RequestError:
    return RequestError("the server cannot write down the request now; ask again", status=503)


def refusal(sentence: str, kind: str = REFUSED) -> Work:
    """Work that fails with a sentence. `OVERDUE`: the journal gets it, as it has a request that could be done."""

    def compute() -> None:
        raise RequestError(sentence)

    return Work(kind, compute, answering({}))


def absent(model: ClientModel | None, identity: str) -> str:
    """Return why there is no such model."""
    return model.lost if model is not None and model.lost else f"model {identity:.200} does not exist"
