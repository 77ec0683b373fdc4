"""Sampling sessions: which adapters each one samples with, and how long engines keep them; requests for samples, by turns.

Weights that a model passes on lie in a scratch folder until nobody samples with them; those of checkpoints stay in the store.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker import types

from megarl.observe.record_lines import object_line
from megarl.options.serve.futures import Promises
from megarl.options.serve.old_records import KEPT_S
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import SamplerRecord
from megarl.options.serve.request_order import FairSlots
from megarl.options.serve.sampling_sessions import (
    NOTE,
    PassedWeights,
    SamplingSession,
    ServedAdapter,
    folder_of_note,
    remove_passed,
)
from megarl.options.serve.settings import ServiceOptions
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import Tenant, Tenants
from megarl.options.serve.values import RequestError, Sampler
from megarl.options.serve.wire import AskedSamples, digest_of_json, read_sample, sampled_bytes

if TYPE_CHECKING:
    from megarl.options.serve.worker import ClientModel

CLONE = 1_000_000_000
"""Numbers of a clone's requests begin with its own number times this."""
DAY_S = 86_400.0
_ADAPTER_FILE, _MODEL_FILE = "adapter_config.json", "config.json"
PASSED = ""
"""The path of samplers whose weights a model passed on, which no checkpoint has."""


class ServedSamplers:
    """All sampling sessions of a server. Used in one event loop."""

    def __init__(
        self, options: ServiceOptions, sampler: Sampler, promises: Promises, store: CheckpointStore, tenants: Tenants
    ) -> None:
        self._options, self._sampler, self._promises = options, sampler, promises
        self._store, self._tenants = store, tenants
        self._slots = FairSlots(options.sampling_slots)
        self._adapters: dict[str, ServedAdapter] = {}
        self._newest: dict[str, ServedAdapter] = {}
        """By model what it passed on last, and by `model inflight` what its inflight samplers use."""
        self.sessions: dict[str, SamplingSession] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped = False

    # sessions ----------------------------------------------------------------------------------------------------------

    async def create(self, tenant: Tenant, asked: types.CreateSamplingSessionRequest) -> dict[str, Any]:
        """Answer `create_sampling_session`.

        Raises:
            RequestError: there is no such model or checkpoint, or the number was used for another one.
        """
        identity, digest = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}", digest_of_json(asked)
        if not self._is_made(tenant, asked, identity, digest):
            base_model, adapter = await self._source(tenant, asked.base_model, asked.model_path)
            try:
                if not self._is_made(tenant, asked, identity, digest):  # engines may have loaded it for minutes
                    made = SamplingSession(identity, tenant.name, asked.session_id, base_model, digest, adapter)
                    self._add(made, asked.model_path)
            finally:
                self._release(adapter)
        return {"sampling_session_id": identity, "type": "create_sampling_session"}

    def _is_made(self, tenant: Tenant, asked: types.CreateSamplingSessionRequest, identity: str, digest: bytes) -> bool:
        """Return whether a sampling session is there already.

        Raises:
            RequestError: its client's session is over, or its number was used for another one.
        """
        self._store.registry.open_session(tenant.name, asked.session_id)
        there = self.sessions.get(identity)
        if there is not None and (there.digest not in (b"", digest) or there.tenant != tenant.name):
            number = asked.sampling_session_seq_id
            raise RequestError(f"sampling_session_seq_id is {number}, which came before with other content")
        return there is not None

    def join(self, tenant: Tenant, asked: types.JoinSamplingSessionRequest) -> dict[str, Any]:
        """Answer `join_sampling_session` with a number that no other clone has."""
        session = self._find(tenant, asked.sampling_session_id)
        session.clones += 1
        return {"client_counter": session.clones, "type": "join_sampling_session"}

    def new_folder(self) -> Path:
        """A place, where nothing is yet, for weights that a model passes on."""
        self._options.scratch.mkdir(parents=True, exist_ok=True)
        return self._options.scratch / f"passed-{secrets.token_hex(8)}"

    def to_pass(self, model: ClientModel, seq: int, folder: Path, digest: bytes, *, is_inflight: bool) -> PassedWeights:
        """Note what a model will write to `folder`, for the `seq`-th sampling session of its session. Any thread may call it.

        Raises:
            RequestError: the number was used before.
        """
        identity = f"{model.session}:sample:{seq}"
        there = self.sessions.get(identity)
        if there is not None and (there.digest != digest or there.tenant != model.tenant):
            raise _used_before(identity)
        inflight, is_there = f"{model.id} inflight" if is_inflight else "", there is not None
        names = identity, model.tenant, model.session, model.base_model, model.id, inflight
        return PassedWeights(*names, folder, digest.hex(), is_there)

    async def add_passed(self, passed: PassedWeights) -> None:
        """Have engines sample with what a model has written, and make its sampling session.

        Raises:
            RequestError: engines do not take it, or meanwhile its client's session is over, or has such a sampling session.
        """
        adapter = ServedAdapter(passed.folder.name, passed.folder, passed.model, users=1, used=time.monotonic())
        self._adapters[adapter.name] = adapter
        try:
            await self._ready(adapter)
            self._store.registry.open_session(passed.tenant, passed.session)
            if passed.id in self.sessions:
                raise _used_before(passed.id)
            self._add_session(passed, adapter)
        except BaseException:
            passed.remove()
            raise
        finally:
            self._release(adapter)

    def _add_session(self, passed: PassedWeights, adapter: ServedAdapter) -> SamplingSession:
        own = None if passed.inflight else adapter
        digest = bytes.fromhex(passed.request)
        made = SamplingSession(passed.id, passed.tenant, passed.session, passed.base_model, digest, own, passed.inflight)
        for key in filter(None, (passed.model, passed.inflight)):
            before = self._newest.get(key)
            self._newest[key] = adapter
            adapter.users += 1
            self._release(before)
        self._add(made, PASSED)
        return made

    def restore(self) -> None:
        """Take up what was passed on before the server was started again; engines load it when it is sampled with."""
        scratch = self._options.scratch
        notes = sorted(scratch.glob(f"*{NOTE}"), key=lambda note: note.stat().st_mtime_ns)
        for folder in {*scratch.glob("passed-*")} - {*notes} - {folder_of_note(note) for note in notes}:
            shutil.rmtree(folder, ignore_errors=True)
        for note in notes:
            try:
                passed = PassedWeights(**object_line(note.read_bytes()), folder=folder_of_note(note))
                kept = ServedAdapter(passed.folder.name, passed.folder, passed.model)
                adapter = self._adapters.setdefault(kept.name, kept)
                self._add_session(passed, adapter).clones = _clones_after_a_restart()
            except (OSError, ValueError, TypeError, RequestError) as error:
                self._options.say(f"weights in '{folder_of_note(note)}' cannot be served again: {error}")
                note.unlink(missing_ok=True)
        now, registry = time.monotonic(), self._store.registry
        for tenant in self._tenants.names:
            are_open = {session.id for session in registry.sessions.of(tenant) if session.status is None}
            for record in registry.samplers.of(tenant):
                if record.session in are_open and record.id not in self.sessions and record.model_path != PASSED:
                    used = now - max(0.0, self._store.clock() - max(record.created, record.last_used))
                    made = SamplingSession(record.id, tenant, record.session, record.base_model, b"", used=used)
                    made.path, made.clones = record.model_path or "", _clones_after_a_restart()
                    self.sessions[made.id] = made

    async def _source(self, tenant: Tenant, base_model: str | None, model_path: str | None) -> tuple[str, ServedAdapter | None]:
        """The base model and the adapters that are asked for; the caller releases them."""
        served = self._options.models
        if model_path is None:
            if base_model not in served:
                raise RequestError(f"base_model is {base_model!r:.200}; it must be one of {', '.join(served)}", status=404)
            return str(base_model), None
        path = CheckpointPath.parse(model_path)
        made = str(self._store.find(tenant.name, path).made.get("base_model"))
        if made not in served or base_model not in (None, made):
            raise RequestError(
                f"base_model is {base_model or made:.200}, and {model_path:.300} is of {made}, which must be served"
            )
        return made, await self._of_checkpoint(tenant, path)

    async def _of_checkpoint(self, tenant: Tenant, path: CheckpointPath) -> ServedAdapter:
        """The adapters of a checkpoint, loaded if they were not, which stay until the caller releases them."""
        info = self._store.find(tenant.name, path)
        name = f"{path.text} {info.created}"
        adapter = self._adapters.get(name)
        if adapter is None:
            folder = await asyncio.to_thread(self._pinned, tenant.name, path)
            adapter = self._adapters.setdefault(name, ServedAdapter(name, folder, path.text, path))
            if adapter.folder is not folder:  # another request was quicker
                self._store.unpin(path)
        adapter.users += 1
        try:
            await self._ready(adapter)
        except BaseException:
            self._release(adapter)
            raise
        return adapter

    def _pinned(self, tenant: str, path: CheckpointPath) -> Path:
        """The PEFT folder of a checkpoint whose bytes were checked, pinned."""
        with self._store.reading(tenant, path) as folder:
            name = _MODEL_FILE if self._options.full_weights else _ADAPTER_FILE
            found = sorted(folder.rglob(name), key=lambda file: len(file.parts))
            if not found:
                raise RequestError(f"{path} has no weights to sample with; save them with save_weights_for_sampler")
            self._store.pin(tenant, path)
            return found[0].parent

    async def _ready(self, adapter: ServedAdapter) -> None:
        """Wait until engines have it; the first who asks has them load it, and the next one where that failed."""
        if adapter.ready is None or (adapter.ready.done() and (adapter.ready.cancelled() or adapter.ready.exception())):
            name = _engine_name(adapter.name)
            adapter.ready = asyncio.ensure_future(self._sampler.add(name, adapter.folder))
        await asyncio.shield(adapter.ready)

    def _add(self, made: SamplingSession, model_path: str | None) -> None:
        made.used = time.monotonic()
        if made.adapter is not None:
            made.adapter.users += 1
        self.sessions[made.id] = made
        samplers = self._store.registry.samplers
        if samplers.owner(made.id) is None:
            samplers.add(SamplerRecord(made.id, made.tenant, time.time(), made.session, made.base_model, model_path))

    def _find(self, tenant: Tenant, identity: str) -> SamplingSession:
        session = self.sessions.get(identity)
        if session is None or session.tenant != tenant.name:
            self._store.registry.check_not_idle(tenant.name, identity)
            raise _gone(identity)
        return session

    # samples -----------------------------------------------------------------------------------------------------------

    async def sample(self, tenant: Tenant, asked: types.SampleRequest) -> dict[str, Any]:
        """Answer `asample` with a future.

        Raises:
            RequestError: there are too many requests, or the session is over; anything else fails by its future.
        """
        digest = digest_of_json(asked)
        target = None
        if asked.sampling_session_id is not None:
            if asked.seq_id is None or asked.seq_id < 0:
                return self._refused(tenant, "seq_id must be given with sampling_session_id, 0 or more")
            identity = f"{asked.sampling_session_id}:{asked.seq_id}"
            target = (asked.sampling_session_id, asked.seq_id // CLONE)
            if (known := self._known(tenant, identity, asked, digest)) is not None:
                return known
        else:
            identity = f"sample:{secrets.token_hex(12)}:0"
        try:
            request = await asyncio.to_thread(read_sample, asked, self._options.max_body_bytes, tenant=tenant.name)
            self._promises.check_room(tenant.name)
            session = await self._session_of(tenant, asked)
        except RequestError as error:
            if error.status in (410, 429):
                raise
            return self._refused(tenant, str(error))
        if (known := self._known(tenant, identity, asked, digest)) is not None:  # it came again meanwhile
            return known
        try:
            self._tenants.usage.begin(tenant)
        except RequestError:
            self._end_single(session)
            raise
        promise = self._promises.make(identity, tenant.name, digest, target=target)
        promise.at_end.append(lambda: self._tenants.usage.end(tenant))
        adapter = session.adapter
        if adapter is not None:
            adapter.users += 1  # until the request is answered, whatever becomes of the sampling session
        session.waiting += 1
        task = asyncio.create_task(self._run(session, adapter, request, promise), name=identity)
        promise.cancel = task.cancel
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, session, adapter))
        return _future(identity, asked.num_samples)

    def _known(self, tenant: Tenant, identity: str, asked: types.SampleRequest, digest: bytes) -> dict[str, Any] | None:
        """The future of a request that came before; a refusal where another one came with its number."""
        known = self._promises.known(identity)
        if known is None or known.tenant != tenant.name:
            return None
        if known.digest != digest:
            return self._refused(tenant, f"seq_id is {asked.seq_id}, which came before with other content")
        return _future(identity, asked.num_samples)

    async def _session_of(self, tenant: Tenant, asked: types.SampleRequest) -> SamplingSession:
        if asked.sampling_session_id is not None:
            session = self._find(tenant, asked.sampling_session_id)
            if session.over:
                raise RequestError(session.over)
            if session.path and session.adapter is None:
                loaded = await self._of_checkpoint(tenant, CheckpointPath.parse(session.path))
                try:
                    self._check_there(session)
                    if session.adapter is None:
                        session.adapter = loaded
                        loaded.users += 1
                finally:
                    self._release(loaded)
            if session.adapter is not None and session.adapter.path is not None:
                self._store.find(tenant.name, session.adapter.path)  # deleted or expired since
            return session
        base_model, adapter = await self._source(tenant, asked.base_model, asked.model_path)
        return SamplingSession("", tenant.name, tenant.name, base_model, b"", adapter)

    def _check_there(self, session: SamplingSession) -> None:
        """Refuse what is asked of a sampling session that was ended meanwhile.

        Raises:
            RequestError: it was.
        """
        if session.id and self.sessions.get(session.id) is not session:
            raise _gone(session.id)

    async def _run(self, session: SamplingSession, adapter: ServedAdapter | None, asked: AskedSamples, promise: Any) -> None:
        """Answer a request by `adapter`, or the newest of the model's if the session is of these; None: by the base model."""
        try:
            async with self._slots.slot(session.tenant, session.session):
                self._check_there(session)
                adapter = self._newest[session.inflight] if session.inflight else adapter
                session.used = time.monotonic()
                if adapter is None:
                    sampled = await self._sampler.sample(asked.request)
                else:
                    adapter.users += 1
                    adapter.used = session.used
                    try:
                        await self._ready(adapter)
                        sampled = await self._sampler.sample(replace(asked.request, adapter=_engine_name(adapter.name)))
                    finally:
                        adapter.used = session.used = time.monotonic()
                        self._release(adapter)
            self._promises.keep(promise, sampled_bytes(sampled, asked.layout))
            if self._options.answered is not None:
                model = session.base_model if adapter is None else adapter.model
                self._options.answered(promise.id, model, asked.request, sampled)
        except RequestError as error:
            self._promises.fail(promise, str(error))
        except asyncio.CancelledError:
            if not self._stopped:
                self._promises.fail(promise, "the request was cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - whatever engines raise, the promise is settled
            self._options.say(f"sample {promise.id} failed: {type(error).__name__}: {error}")
            self._promises.fail(promise, f"the server could not sample: {type(error).__name__}", "server")

    def _ended(self, session: SamplingSession, adapter: ServedAdapter | None, task: asyncio.Task[Any]) -> None:
        """Let go of what a request has kept."""
        self._tasks.discard(task)
        session.waiting -= 1
        self._release(adapter)
        self._end_single(session)
        if session.id and not session.waiting and session.id not in self.sessions:
            self._promises.drop_target(session.id)

    def _end_single(self, session: SamplingSession) -> None:
        """Let go of what a request without a sampling session samples with."""
        if not session.id:
            self._end(session)

    def _refused(self, tenant: Tenant, sentence: str) -> dict[str, Any]:
        self._promises.check_room(tenant.name)
        promise = self._promises.make(f"refused:{secrets.token_hex(12)}:-1", tenant.name, b"")
        self._promises.fail(promise, sentence)
        return {"request_id": promise.id}

    # ends --------------------------------------------------------------------------------------------------------------

    def end_session(self, session: str) -> None:
        """End a client's sampling sessions, and let engines forget what only they used."""
        for made in [made for made in self.sessions.values() if made.session == session]:
            self._forget(made)
        for key in [key for key in self._newest if key.startswith(f"{session}:")]:
            self._release(self._newest.pop(key))

    def drop_model(self, model: str) -> None:
        """Let go of what a model passed on, as it is gone; its sampling sessions go on."""
        self._release(self._newest.pop(model, None))

    def expire(self) -> None:
        """End sampling sessions that were passed weights which were replaced since, and that nobody has used for long.

        They are forgotten later, when answers of them are, as are all that were not used for as long as records are kept.
        Engines forget the adapters of checkpoints that are gone, too.
        """
        now, records = time.monotonic(), self._store.registry.samplers
        for made in [*self.sessions.values()]:
            if now - made.used > (self._options.sampler_idle_s + self._options.keep_answers_s if made.over else KEPT_S):
                self._forget(made)
                records.remove(made.id)
            elif records.owner(made.id) is not None:
                record, used = records.get(made.tenant, made.id), self._store.clock() - (now - made.used)
                if used - max(record.created, record.last_used) > DAY_S:
                    records.change(made.tenant, made.id, last_used=used)
        newest = {id(adapter) for adapter in self._newest.values()}
        for made in self.sessions.values():
            adapter = made.adapter
            is_passed = adapter is not None and adapter.path is None
            idle_s = self._options.sampler_idle_s
            if is_passed and id(adapter) not in newest and not made.waiting and now - made.used > idle_s:
                self._end(made)
                made.over = f"sampler {made.id} has expired: it was not used for {idle_s:.0f} s; save weights again"
            if adapter is not None and adapter.path is not None and not self._store.is_there(made.tenant, adapter.path):
                self._end(made)
                made.path = adapter.path.text  # who samples hears that it does not exist

    def _forget(self, made: SamplingSession) -> None:
        self._end(made)
        del self.sessions[made.id]
        self._promises.drop_target(made.id)

    def _end(self, made: SamplingSession) -> None:
        adapter, made.adapter = made.adapter, None
        self._release(adapter)

    def _release(self, adapter: ServedAdapter | None) -> None:
        """End one use of adapters, if there are any; engines forget those that nobody uses any more."""
        if adapter is None:
            return
        adapter.users -= 1
        if adapter.users > 0 or self._adapters.get(adapter.name) is not adapter:
            return
        del self._adapters[adapter.name]
        task = asyncio.create_task(self._drop(adapter))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drop(self, adapter: ServedAdapter) -> None:
        with suppress(RequestError):
            await self._sampler.drop(_engine_name(adapter.name))
        if adapter.path is not None:
            self._store.unpin(adapter.path)
            return
        await asyncio.to_thread(remove_passed, adapter.folder)

    async def stop(self) -> None:
        """End all requests, which clients send again to the next server."""
        self._stopped = True
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _gone(identity: str) -> RequestError:
    return RequestError(f"sampler {identity:.200} does not exist, or has expired", status=404)


def _used_before(identity: str) -> RequestError:
    return RequestError(f"sampling_session_seq_id is {identity.rpartition(':')[2]}, which was used before")


def _future(identity: str, samples: int) -> dict[str, Any]:
    most = min(max(samples, 0), 4096)
    return {"request_id": identity, "sample_sequence_ids": [f"{identity}:{number}" for number in range(most)]}


def _clones_after_a_restart() -> int:
    """Number that clones of a sampling session are counted from, above those that clients have from the server before."""
    return int(time.time()) % CLONE


def _engine_name(name: str) -> str:
    """A name for engines, without what URLs and folders give a meaning."""
    return "".join(sign if sign.isalnum() or sign in "-_." else "_" for sign in name)
