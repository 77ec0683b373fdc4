"""The thread that trains: it takes jobs in turn, writes to the journal what must outlive a crash, and settles promises.

A job's `compute` runs in the thread, its `finish` in the event loop beside the next job.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.errors import CheckpointError
from megarl.options.serve.futures import JSON, Promise, Promises
from megarl.options.serve.journal import JournalEntry, RequestJournal
from megarl.options.serve.order import FairQueue, Lane
from megarl.options.serve.values import AdapterChoice, RequestError, Trainer
from megarl.options.serve.wire import PROTOBUF

Settled = Mapping[str, Any] | bytes
REDO, ANSWER = "redo", "answer"


@dataclass
class ClientModel:
    """A model of a client. `choice` None: all weights are trained; `lost`: why it cannot be used, if it cannot."""

    id: str
    tenant: str
    session: str
    base_model: str
    choice: AdapterChoice | None
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    lane: Lane[TrainingJob] = field(default_factory=Lane)
    lost: str = ""
    used: float = 0.0
    done: int = -1
    """Number of the last request that was computed."""
    has_gradients: bool = False
    finishing: int = 0
    """Jobs that are computed and not settled."""
    kept: float = field(default_factory=time.monotonic)
    """When its last snapshot was made."""


@dataclass
class TrainingJob:
    """A request of a model whose turn comes. `redo`: what it is computed from after a crash; None: its answer is kept."""

    model: ClientModel
    seq: int
    digest: bytes
    kind: str
    promise: Promise
    compute: Callable[[], Any]
    finish: Callable[[Any], Awaitable[Settled]]
    redo: bytes | None = None
    answer_of: Callable[[Any], Mapping[str, Any]] | None = None
    """Of what `compute` returned, what `finish` will answer: the journal has it before the next job has an effect."""
    at_error: Callable[[str], None] | None = None


class TrainerWorker:
    """Runs jobs of all models. `start` and everything else but `compute` happen in one event loop."""

    def __init__(
        self,
        trainer: Trainer,
        promises: Promises,
        journal: RequestJournal | None,
        *,
        snapshot_every_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`say` gets warnings."""
        self.trainer, self._promises, self._journal = trainer, promises, journal
        self._every_s, self._say = snapshot_every_s, say
        self._queue: FairQueue[TrainingJob] = FairQueue()
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._disk = ThreadPoolExecutor(2, "journal")
        self._task: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to take jobs."""
        self._task = asyncio.create_task(self._run(), name="trainer")

    async def stop(self, models: list[ClientModel]) -> None:
        """End after the job that runs, settle what is computed, and keep all models."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.in_thread(lambda: None)  # the job that runs
        await asyncio.gather(*self._finishing, return_exceptions=True)
        for model in models:
            await self._snapshot(model)
        if self._journal is not None:
            await asyncio.get_running_loop().run_in_executor(self._disk, self._journal.close)
        self._thread.shutdown(wait=False)
        self._disk.shutdown(wait=False)

    def put(self, client: str, job: TrainingJob) -> None:
        """Add a job whose turn has come in its model."""
        self._queue.put(client, job)

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """Run a call in the trainer's thread, between jobs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _run(self) -> None:
        job: TrainingJob | None = None
        while True:
            job = await self._queue.take(partial(_goes_on, job))
            model = job.model
            running = asyncio.ensure_future(self.in_thread(partial(self._compute, job)))
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                if not running.cancelled():  # what has begun is settled
                    self._finish_later(job, running)
                raise
            except Exception as error:  # noqa: BLE001 - whatever the trainer raises, the promise is settled
                self._finish_later(job, running, error)
            else:
                self._finish_later(job, running)
            is_due = job.kind == "optim_step" and time.monotonic() - model.kept > self._every_s
            if is_due or (job.kind == "load" and running.exception() is None):
                await self._snapshot(model)

    def _compute(self, job: TrainingJob) -> Any:
        """Run in the thread; the journal has the request before it has an effect."""
        if job.model.lost:
            raise RequestError(job.model.lost)
        if self._journal is not None and job.redo is not None:
            self._journal.append(job.model.id, job.seq, f"{REDO}:{job.kind}:{job.digest.hex()}", job.redo)
        value = job.compute()
        if self._journal is not None and job.answer_of is not None and not job.model.lost:
            entry = _answer_entry(job.answer_of(value), job.digest, failed=False)
            self._journal.append(job.model.id, job.seq, *entry)
        return value

    def _finish_later(self, job: TrainingJob, running: asyncio.Future[Any], error: Exception | None = None) -> None:
        model = job.model
        if job.seq >= 0:
            model.done = max(model.done, job.seq)
        if error is None and job.kind in ("forward_backward", "optim_step", "load"):
            model.has_gradients = job.kind == "forward_backward"
        model.finishing += 1
        task = asyncio.create_task(self._finish(job, running))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, job: TrainingJob, running: asyncio.Future[Any]) -> None:
        try:
            try:
                answer = await job.finish(await running)
                await self._keep(job, answer)
                self._promises.keep(job.promise, answer)
            except RequestError as error:
                await self._fail(job, str(error), "user")
            except Exception as error:  # noqa: BLE001 - as above
                self._say(f"request {job.seq} ({job.kind}) of model {job.model.id} failed: {type(error).__name__}: {error}")
                await self._fail(job, f"the server could not do {job.kind}: {type(error).__name__}", "server")
        finally:
            job.model.finishing -= 1

    async def _fail(self, job: TrainingJob, sentence: str, category: Any) -> None:
        if job.at_error is not None:
            job.at_error(sentence)
        try:
            await self._keep(job, {"error": sentence, "category": category}, failed=True)
        except (OSError, CheckpointError) as error:
            self._say(f"the journal of model {job.model.id} could not be written: {error}")
        self._promises.fail(job.promise, sentence, category)

    async def _keep(self, job: TrainingJob, answer: Settled, *, failed: bool = False) -> None:
        """Have the journal on disk before an answer is given out."""
        journal = self._journal
        if journal is None or job.seq < 0 or job.model.lost:
            return
        loop = asyncio.get_running_loop()
        is_told = (job.answer_of is None or failed) if job.redo is None else failed and job.kind == "load"
        if is_told:
            entry = _answer_entry(answer, job.digest, failed=failed)
            await loop.run_in_executor(self._disk, journal.append, job.model.id, job.seq, *entry)
        await loop.run_in_executor(self._disk, journal.flush)

    async def _snapshot(self, model: ClientModel) -> None:
        """Keep a model as it is, if it has no gradients that wait for a step, and forget the requests before."""
        journal = self._journal
        if journal is None or model.lost or model.has_gradients or model.finishing > 1 or model.done < 1:
            return
        while model.finishing:  # the answer of the last job is one that is carried
            await asyncio.gather(*self._finishing, return_exceptions=True)
        carried = []
        for promise in self._promises.unsure(model.id):
            seq = int(promise.id.rpartition(":")[2])
            if 0 <= seq <= model.done:
                kind = f"{ANSWER}:{promise.media}:{int(promise.failed)}:{promise.digest.hex()}"
                carried.append(JournalEntry(seq, kind, promise.content))
        model.kept = time.monotonic()
        write = partial(self.trainer.save, model.id)
        try:
            await self.in_thread(partial(journal.snapshot, model.id, model.done, write, carried))
        except Exception as error:  # noqa: BLE001 - the requests since the last snapshot are kept instead
            self._say(f"no snapshot of model {model.id}, whose journal grows: {error}")


def _goes_on(last: TrainingJob | None, job: TrainingJob) -> bool | None:
    """Return whether a job is an optimizer step of the model that has its place on the ranks; None: it is of another model.

    Such a step is short, and behind it there are no gradients to move: two models that take turns are switched half as often.
    """
    return job.kind == "optim_step" if last is not None and job.model is last.model else None


def _answer_entry(answer: Settled, digest: bytes, *, failed: bool) -> tuple[str, bytes]:
    media = PROTOBUF if isinstance(answer, bytes) else JSON
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return f"{ANSWER}:{media}:{int(failed)}:{digest.hex()}", content


@dataclass(frozen=True)
class KeptRequest:
    """An entry of a journal as it was meant: `kind` empty: `content` is the answer, else what it is computed again from."""

    seq: int
    digest: bytes
    content: bytes
    kind: str = ""
    media: str = JSON
    failed: bool = False


def kept_request(entry: JournalEntry) -> KeptRequest:
    """Entry of a journal as the request that it was.

    Raises:
        CheckpointError: it is none of this server.
    """
    parts = entry.kind.split(":")
    if parts[0] == REDO and len(parts) == 3:
        return KeptRequest(entry.seq, bytes.fromhex(parts[2]), entry.body, kind=parts[1])
    if parts[0] == ANSWER and len(parts) == 4:
        return KeptRequest(entry.seq, bytes.fromhex(parts[3]), entry.body, media=parts[1], failed=parts[2] == "1")
    raise CheckpointError(f"the journal has an entry of the kind {entry.kind!r}, which this server does not write")
