"""The thread that trains: it takes jobs in turn, writes answers that must outlive a crash, and settles promises.

A job's `compute` runs in the thread, its `finish` in the event loop beside the next job.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megarl.errors import CheckpointError, DeadlineError, WorkerError
from megarl.options.serve.futures import JSON, Promise, Promises
from megarl.options.serve.journal import Content, JournalEntry, RequestJournal
from megarl.options.serve.request_order import FairQueue, Lane
from megarl.options.serve.values import AdapterChoice, RequestError, Trainer
from megarl.options.serve.wire import PROTOBUF

Settled = Mapping[str, Any] | bytes
REDO, ANSWER, DONE = "redo", "answer", "done"
"""What a journal's entries are: what a request is made of again, an answer, and that all requests up to a number had their
turn."""
PASS, STEP, LOAD = "forward_backward", "optim_step", "load"
ENTRY_BYTES = 1_024
"""Bytes that a request takes beside its body, about."""
REFUSED, REFUSED_PASS, REFUSED_STEP, OVERDUE = "refused", "refused_pass", "refused_step", "overdue"
"""Kinds of a request that only fails, again too: any, a `forward_backward`, an `optim_step`, one that waited in vain."""


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
    used: float = field(default_factory=time.monotonic)
    """When a request of it came last, or it was lost."""
    done: int = -1
    """Number of the last request that was computed."""
    steps: list[int] = field(default_factory=list)
    """Numbers of the requests since the last snapshot that its weights and moments are made by, the last a step or a load."""
    passes: list[int] = field(default_factory=list)
    """Numbers of those that its gradients are made by, since the last step; `pass_bytes`: theirs in the journal."""
    pass_bytes: int = 0
    spoilt: str = ""
    """Why gradients since the last step are not all that a client asked for, if they are not; `spoilt_by`: the request."""
    spoilt_by: int = -1
    finishing: int = 0
    """Jobs that are computed and not settled."""
    kept: float = field(default_factory=time.monotonic)
    """When its last snapshot was made."""


@dataclass
class Work:
    """Steps of a request: `compute` runs in the trainer's thread, `finish` makes the answer of what it returned."""

    kind: str
    compute: Callable[[], Any]
    finish: Callable[[Any], Awaitable[Settled]]
    answer_of: Callable[[Any], Mapping[str, Any]] | None = None
    """Of what `compute` returned, what `finish` will answer, where that must not be computed again after a crash: the journal
    has it before the next job has an effect."""
    at_error: Callable[[str], None] | None = None
    size: int = 0
    """Bytes that a pass takes in the journal."""


@dataclass
class TrainingJob:
    """A request of a model whose turn comes."""

    model: ClientModel
    seq: int
    digest: bytes
    promise: Promise
    work: Work


class TrainerWorker:
    """Runs jobs of all models. `start` and everything else but `compute` happen in one event loop."""

    def __init__(
        self,
        trainer: Trainer,
        promises: Promises,
        journal: RequestJournal | None,
        *,
        snapshot_every_s: float,
        snapshot_bytes: int = 1 << 32,
        say: Callable[[str], None],
    ) -> None:
        """`snapshot_bytes`: of a model's journal, at which a snapshot does not wait for its time. `say` gets warnings."""
        self.trainer, self._promises, self._journal = trainer, promises, journal
        self._every_s, self._snapshot_bytes, self.say = snapshot_every_s, snapshot_bytes, say
        self._queue: FairQueue[TrainingJob] = FairQueue()
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._disk = ThreadPoolExecutor(2, "journal")
        self._task: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._is_down = False
        """Whether ranks were lost: nothing is computed any more, and what waits is done by the next server."""

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
        for model in models if not self._is_down else ():
            await self._keep(model, at_end=True)
        if self._journal is not None:
            await self.on_disk(self._journal.close)
        self._thread.shutdown(wait=False)
        self._disk.shutdown(wait=False)

    def put(self, job: TrainingJob) -> None:
        """Add a job whose turn has come in its model."""
        self._queue.put(job.model.tenant, job.model.session, job)

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """Run a call in the trainer's thread, between jobs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def on_disk(self, call: Callable[[], Any]) -> Any:
        """Run a call in a thread for what is written."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, call)

    async def _run(self) -> None:
        job: TrainingJob | None = None
        while True:
            job = await self._queue.take(partial(_goes_on, job))
            model = job.model
            running = asyncio.ensure_future(self.in_thread(partial(self._compute, job)))
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])  # what has begun is settled
                failed = running.exception()
                self._finish_later(job, running, failed if isinstance(failed, Exception) else None)
                raise
            except (WorkerError, DeadlineError) as error:
                self.say(f"request {job.seq} ({job.work.kind}) of model {model.id} waits for the next server: {error}")
                self._is_down = True
                return
            except Exception as error:  # noqa: BLE001 - whatever the trainer raises, the promise is settled
                self._finish_later(job, running, error)
            else:
                self._finish_later(job, running)
            if job.work.kind == "load" and running.exception() is None:
                model.kept = -math.inf  # the checkpoint that it is of may be deleted
            await self._keep(model)

    def _compute(self, job: TrainingJob) -> Any:
        """Run in the thread."""
        if job.model.lost:
            raise RequestError(job.model.lost)
        if job.work.kind in (STEP, REFUSED_STEP) and job.model.spoilt:
            self._give_up(job)
        value, answer_of = job.work.compute(), job.work.answer_of
        if self._journal is not None and answer_of is not None and not job.model.lost:
            self._journal.append(job.model.id, job.seq, *_answer_entry(answer_of(value), job.digest, failed=False))
        return value

    def _give_up(self, job: TrainingJob) -> None:
        """Refuse a step behind a pass that failed: clients send both at once, and mean the gradients of all their passes."""
        self.trainer.forget_gradients(job.model.id)
        if job.work.kind == STEP:
            raise RequestError(
                f"{job.model.spoilt}, so there is no step, and gradients since the last one are dropped; send them again"
            )

    def _finish_later(self, job: TrainingJob, running: asyncio.Future[Any], error: Exception | None = None) -> None:
        model = job.model
        if job.seq >= 0:
            model.done = max(model.done, job.seq)
        kind = job.work.kind
        if error is None and kind == PASS:
            model.passes.append(job.seq)
            model.pass_bytes += job.work.size + ENTRY_BYTES
        elif error is None and kind in (STEP, LOAD):
            model.steps += [*model.passes, job.seq]
            model.passes, model.pass_bytes, model.spoilt = [], 0, ""
        elif kind in (PASS, REFUSED_PASS, OVERDUE):
            why = str(error) if isinstance(error, RequestError) else "the server failed"
            model.spoilt = why if kind == OVERDUE else f"request {job.seq}, {PASS} since the last {STEP}, failed ({why})"
            model.spoilt_by = job.seq
        elif kind in (STEP, REFUSED_STEP) and model.spoilt:
            model.passes, model.pass_bytes, model.spoilt = [], 0, ""
        model.finishing += 1
        task = asyncio.create_task(self._finish(job, running))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, job: TrainingJob, running: asyncio.Future[Any]) -> None:
        try:
            try:
                answer = await job.work.finish(await running)
                if self._journal is not None:
                    await self.on_disk(self._journal.flush)
                self._promises.keep(job.promise, answer)
            except RequestError as error:
                await self._fail(job, str(error), "user")
            except (WorkerError, DeadlineError):
                self._is_down = True  # the client hears nothing of it
            except Exception as error:  # noqa: BLE001 - as above
                kind = job.work.kind
                self.say(f"request {job.seq} ({kind}) of model {job.model.id} failed: {type(error).__name__}: {error}")
                await self._fail(job, f"the server could not do {kind}: {type(error).__name__}", "server")
        finally:
            job.model.finishing -= 1

    async def _fail(self, job: TrainingJob, sentence: str, category: Any) -> None:
        if job.work.at_error is not None:
            job.work.at_error(sentence)
        try:
            await self._keep_failure(job, {"error": sentence, "category": category})
        except (OSError, CheckpointError) as error:
            self.say(f"the journal of model {job.model.id} could not be written: {error}")
        self._promises.fail(job.promise, sentence, category)

    async def _keep_failure(self, job: TrainingJob, answer: Settled) -> None:
        """Have on disk that a request had no effect, before its client is told."""
        journal = self._journal
        if journal is None or job.model.lost or job.work.kind in (REFUSED, REFUSED_PASS):
            return
        await self.on_disk(partial(journal.append, job.model.id, job.seq, *_answer_entry(answer, job.digest, failed=True)))
        await self.on_disk(journal.flush)

    async def _keep(self, model: ClientModel, *, at_end: bool = False) -> None:
        """Make a snapshot or trim the journal, if it is time for it."""
        journal = self._journal
        if journal is None or model.lost or model.done < 1:
            return
        is_snapshot = bool(model.steps) and not model.passes and not model.spoilt  # it has no gradients
        is_due = time.monotonic() - model.kept > self._every_s or journal.bytes_of(model.id) > self._snapshot_bytes
        if not at_end and not (is_due and is_snapshot) and not journal.has_grown(model.id):
            return
        while model.finishing:  # the answer of the last job is one that is carried
            await asyncio.gather(*self._finishing, return_exceptions=True)
        try:
            if is_snapshot:
                await self._snapshot(journal, model)
            else:
                await self._trim(journal, model)
        except Exception as error:  # noqa: BLE001 - the requests since the last snapshot are kept instead
            self.say(f"no snapshot of model {model.id}, whose journal grows: {error}")

    async def _snapshot(self, journal: RequestJournal, model: ClientModel) -> None:
        """Keep a model as it is, and forget the requests before."""
        model.kept = time.monotonic()
        write = partial(self.trainer.save, model.id)
        await self.in_thread(partial(journal.snapshot, model.id, model.done, write, self._unsure(model)))
        model.steps = []

    async def _trim(self, journal: RequestJournal, model: ClientModel) -> None:
        """Forget requests that are done and that the model's state does not need, and passes behind which there is no step."""
        done, needed = model.done, {*model.steps, *([model.spoilt_by] if model.spoilt else model.passes)}

        def keep(entry: JournalEntry) -> JournalEntry | None:
            what, _, rest = entry.kind.partition(":")
            if entry.seq > done or (what == REDO and entry.seq == 0):
                return entry
            if entry.seq not in needed:
                return None
            is_failed = model.spoilt and entry.seq == model.spoilt_by and rest.startswith(f"{PASS}:")
            return replace(entry, body=b"") if is_failed else entry  # it is not computed again

        carried = [entry for entry in self._unsure(model) if entry.seq not in needed]
        carried.append(JournalEntry(done, DONE, b""))
        await self.in_thread(partial(journal.trim, model.id, keep, carried))

    def _unsure(self, model: ClientModel) -> list[JournalEntry]:
        """Answers to what is done that the model's client may not have."""
        carried = []
        for promise in self._promises.unsure(model.id):
            seq = int(promise.id.rpartition(":")[2])
            if 0 <= seq <= model.done:
                kind = f"{ANSWER}:{promise.media}:{int(promise.failed)}:{promise.digest.hex()}"
                carried.append(JournalEntry(seq, kind, promise.content))
        return carried


def _goes_on(last: TrainingJob | None, job: TrainingJob) -> bool | None:
    """Return whether a job is an optimizer step of the model that has its place on the ranks; None: it is of another model.

    Such a step is short, and behind it there are no gradients to move: two models that take turns are switched half as often.
    """
    return job.work.kind == "optim_step" if last is not None and job.model is last.model else None


def _answer_entry(answer: Settled, digest: bytes, *, failed: bool) -> tuple[str, bytes]:
    media = PROTOBUF if isinstance(answer, bytes) else JSON
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return f"{ANSWER}:{media}:{int(failed)}:{digest.hex()}", content


def redo_kind(kind: str, digest: bytes) -> str:
    """The kind of a journal's entry with what a request is made of again."""
    return f"{REDO}:{kind}:{digest.hex()}"


def answering(answer: Mapping[str, Any]) -> Callable[[Any], Awaitable[Settled]]:
    """A `finish` that always gives this answer."""

    async def finish(_: Any) -> Settled:
        return answer

    return finish


@dataclass(frozen=True)
class KeptRequest:
    """A request of a journal: `kind` and `content` as it came, and its answer if that is not to be computed again."""

    seq: int
    digest: bytes
    kind: str = ""
    content: Content = b""
    answer: bytes | None = None
    media: str = JSON
    failed: bool = False


def kept_requests(entries: Iterable[JournalEntry]) -> tuple[list[KeptRequest], int]:
    """The requests that a journal has, by their numbers, and up to which number it says that all had their turn (−1: none).

    Of several answers to one request the last counts.

    Raises:
        CheckpointError: an entry is none of this server.
    """
    found: dict[int, KeptRequest] = {}
    done = -1
    for entry in entries:
        parts = entry.kind.split(":")
        if parts == [DONE]:
            done = max(done, entry.seq)
            continue
        kept = found.get(entry.seq) or KeptRequest(entry.seq, b"")
        if parts[0] == REDO and len(parts) == 3:
            kept = replace(kept, digest=bytes.fromhex(parts[2]), kind=parts[1], content=entry.body)
        elif parts[0] == ANSWER and len(parts) == 4:
            kept = replace(
                kept, digest=bytes.fromhex(parts[3]), answer=bytes(entry.body), media=parts[1], failed=parts[2] == "1"
            )
        else:
            raise CheckpointError(f"the journal has an entry of the kind {entry.kind!r}, which this server does not write")
        found[entry.seq] = kept
    return [found[seq] for seq in sorted(found)], done
