"""The service behind the routes: sessions of clients, their models and samplers, and what comes back after a restart.

Everything is called in one event loop, after `start` and until `stop`. Tenants see what is theirs, and the base model.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker import types

from megarl.options.serve.after_restart import bring_back
from megarl.options.serve.custom_losses import CustomLosses
from megarl.options.serve.futures import Promises, Reply
from megarl.options.serve.idle import IdleState, idle_sentence
from megarl.options.serve.models import ServedModels, choice_of, with_choice
from megarl.options.serve.old_records import forget_old
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import IDLE, ServedRun, SessionRecord
from megarl.options.serve.sampling import ServedSamplers
from megarl.options.serve.settings import ServiceOptions
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import Tenant, Tenants
from megarl.options.serve.values import RequestError, Sampler, Trainer
from megarl.options.serve.wire import MOST_DATUMS, digest_of_json
from megarl.options.serve.worker import TrainerWorker, TrainingJob, Work

if TYPE_CHECKING:
    from megarl.options.serve.journal import RequestJournal

WATCH_S, FORGET_S = 5.0, 3_600.0
"""Seconds between rounds of the watch, and between those in which it looks for old records."""
ENDS = ("success", "errored", "interrupted")
CHUNK_BYTES = 5_000_000
"""Bytes of a pass's request, about, into which clients cut a batch."""


class Service:
    """Everything that a client can ask for, by names of the protocol."""

    def __init__(
        self,
        options: ServiceOptions,
        *,
        trainer: Trainer,
        sampler: Sampler,
        store: CheckpointStore,
        tenants: Tenants,
        journal: RequestJournal | None = None,
    ) -> None:
        self.options, self.store, self.tenants, self._journal = options, store, tenants, journal
        self.promises = Promises(
            poll_s=options.poll_s,
            keep_s=options.keep_answers_s,
            keep_fetched_s=options.keep_fetched_s,
            keep_bytes=options.keep_answer_bytes,
            most_waiting=options.max_waiting,
            most_of_tenant=options.max_waiting * 3 // 4 if tenants.are_several else None,
        )
        self.worker = TrainerWorker(
            trainer,
            self.promises,
            journal,
            snapshot_every_s=options.snapshot_every_s,
            snapshot_bytes=options.max_step_bytes,
            say=options.say,
        )
        self.samplers = ServedSamplers(options, sampler, self.promises, store, tenants)
        losses = options.scratch.with_name("losses")
        self.losses = CustomLosses(losses, options.read_graph, self.promises, options.say)
        self.models = ServedModels(options, self.worker, self.promises, store, tenants, self.samplers, self.losses, journal)
        self.models.make_room = self._end_longest_idle
        self._seen: dict[str, float] = {}
        """When sessions gave their last sign of life; those that are idle are in `_idle`, with when they became so."""
        self._idle: dict[str, float] = {}
        self._copies: dict[str, tuple[bytes, asyncio.Task[str]]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._stopped = False
        self._forgot = -math.inf

    # life --------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring back models and samplers of the server before, then begin."""
        if self._journal is not None:
            self.losses.restore(self._session)
            await bring_back(self._journal, self.models, self.worker, self.promises, self._is_over)
        self.samplers.restore()
        live = {model.session for model in self.models.models.values()} | {s.session for s in self.samplers.sessions.values()}
        self._seen = dict.fromkeys(live, time.monotonic())
        self.worker.start()
        for session in live:
            tenant = self.store.registry.sessions.owner(session)
            record = self._session(tenant, session) if tenant is not None else None
            if record is not None and record.status is not None:
                self._end_again(session, record.status)
        self._watch = asyncio.create_task(self._keep_watch(), name="watch")

    def _session(self, tenant: str, session: str) -> SessionRecord | None:
        try:
            return self.store.registry.sessions.get(tenant, session)
        except RequestError:
            return None

    def _is_over(self, tenant: str, session: str) -> bool:
        record = self._session(tenant, session)
        return record is not None and record.status is not None and record.status.get("type") != IDLE

    async def stop(self) -> None:
        """End: long polls are answered at once, jobs that run are settled, models are kept. A second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        self.promises.stop()
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self.samplers.stop()
        await self.worker.stop([*self.models.models.values()])
        self.store.registry.write_touched()

    def abandon(self) -> None:
        """Have `stop` do nothing: the trainer is gone, and so is what models could be kept by."""
        self._stopped = True

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self.watch()
                await asyncio.to_thread(self.store.sweep)
                if time.monotonic() - self._forgot > FORGET_S:
                    self._forgot = time.monotonic()
                    await self.forget_old()
            except Exception as error:  # noqa: BLE001 - the next round may do better
                self.options.say(f"the server's watch failed: {type(error).__name__}: {error}")

    def watch(self) -> None:
        """Forget what is over: answers, sessions without a heartbeat, samplers that nobody uses, forgotten models."""
        self.promises.expire()
        self.models.requests.skip_overdue(self.options.gap_s)
        self.samplers.expire()
        now = time.monotonic()
        for session in [*self._seen]:
            if now - self._last_used(session) > self.options.session_idle_s:
                del self._seen[session]
                self._idle[session] = now
                self.samplers.end_session(session)
        for session, since in [*self._idle.items()]:
            used = [model.used for model in self.models.models.values() if model.session == session and not model.lost]
            if now - max([since, *used]) > self.options.model_idle_s:
                self._end_idle(session)
        self.models.forget_lost(self.options.keep_answers_s)

    async def forget_old(self) -> None:
        """Forget records of what is over for long, and what was left of their sessions."""
        models = [model for model in self.models.models.values() if not model.lost]
        sessions = {*self._seen, *self._idle, *(model.session for model in models)}
        live = {"sessions": sessions, "models": {model.id for model in models}, "samplers": {*self.samplers.sessions}}
        gone = {*await asyncio.to_thread(partial(forget_old, self.store, **live))}
        for session in gone:
            self.losses.end_session(session)
        if gone and self._journal is not None:
            await self.worker.on_disk(partial(_drop_of_sessions, self._journal, gone))

    def tenant_of_model(self, model: str) -> str:
        """The tenant of a model; empty: nobody's."""
        found = self.models.models.get(model)
        return found.tenant if found is not None else ""

    def _last_used(self, session: str) -> float:
        """When something came last from a session's client."""
        became_idle = self._idle.get(session, time.monotonic())
        seen = self._seen.get(session, became_idle - self.options.session_idle_s)
        used = [model.used for model in self.models.models.values() if model.session == session]
        used += [sampler.used for sampler in self.samplers.sessions.values() if sampler.session == session]
        return max([seen, *used])

    def _end_longest_idle(self, tenant: str) -> bool:
        """End the session with models of a tenant that has been idle for longest; returns whether there is one."""
        of_tenant = {model.session for model in self.models.models.values() if model.tenant == tenant and not model.lost}
        used = {session: self._last_used(session) for session in of_tenant}
        longest = min(used, key=lambda session: used[session], default="")
        if not longest or time.monotonic() - used[longest] <= self.options.session_idle_s:
            return False
        self._end_idle(longest)
        return True

    def _end_again(self, session: str, status: Mapping[str, Any]) -> None:
        """End a session that the server before did not come to the end of, behind what its models have to do again."""
        models = [model for model in self.models.models.values() if model.session == session and not model.lost]

        async def finish(_: None) -> Mapping[str, Any]:
            self._end(session, status)
            return {}

        if models:
            promise = self.promises.make(f"{session}:end:-1", models[0].tenant, b"")
            self.worker.put(TrainingJob(models[0], -1, b"", promise, Work("end", lambda: None, finish)))
        else:
            self._end(session, status)

    def _end_idle(self, session: str) -> None:
        """End a session whose client was not heard of for long; states of its models are kept as checkpoints."""
        sessions, tenant = self.store.registry.sessions, self.store.registry.sessions.owner(session)
        models = [model for model in self.models.models.values() if model.session == session and not model.lost]
        idle_s = time.monotonic() - self._last_used(session)
        status = {"type": IDLE, "detail": idle_sentence(session, idle_s, models)}
        if tenant is not None and sessions.get(tenant, session).status is None:
            sessions.change(tenant, session, status=status, ended=self.store.clock())
        self._end(session, status)

    def _end(self, session: str, status: Mapping[str, Any]) -> None:
        """Let go of everything of a session that is over."""
        self._seen.pop(session, None)
        self._idle.pop(session, None)
        keep = IdleState(self.store, self.tenants, self.worker.trainer, self.options.say) if status["type"] == IDLE else None
        for model in [*self.models.models.values()]:
            if model.session == session and not model.lost:
                self.models.drop(model, f"model {model.id} is gone, as its session is over", first=keep)
        self.samplers.end_session(session)
        self.losses.end_session(session)

    # sessions ----------------------------------------------------------------------------------------------------------

    def client_config(self) -> dict[str, Any]:
        """Flags for a client that starts."""
        return {
            "pjwt_auth_enabled": True,
            "credential_default_source": "api_key",
            "proto_compress_fwdbwd": True,
            "parallel_fwdbwd_chunks": True,
            "fwdbwd_max_chunk_len": MOST_DATUMS,
            "fwdbwd_max_chunk_bytes_count": min(CHUNK_BYTES, self.options.max_body_bytes // 2),
            "sample_join_sampling_session": True,
            "custom_loss_server_side": self.options.read_graph is not None,
            **self.options.client_flags,
        }

    def dynamic_config(self) -> dict[str, Any]:
        """Flags that clients ask for again and again."""
        return {"sample_cancel_enabled": True, "refresh_interval_sec": 300, **self.options.dynamic_flags}

    def capabilities(self) -> dict[str, Any]:
        """The models that are served."""
        models = [
            {"model_name": name, "max_context_length": tokens or None, "trainable": True, "sampleable": True}
            for name, tokens in self.options.models.items()
        ]
        return {"supported_models": models}

    def create_session(self, tenant: Tenant, asked: types.CreateSessionRequest) -> dict[str, Any]:
        """Answer `create_session`."""
        identity, now = str(uuid.uuid4()), time.time()
        record = SessionRecord(
            identity,
            tenant.name,
            now,
            tuple(asked.tags),
            asked.user_metadata or {},
            asked.sdk_version,
            asked.project_id or "",
            asked.display_name,
            last_seen=now,
        )
        self.store.registry.sessions.add(record)
        self._seen[identity] = time.monotonic()
        return {"type": "create_session", "session_id": identity}

    def heartbeat(self, tenant: Tenant, asked: types.SessionHeartbeatRequest) -> dict[str, Any]:
        """Answer `session_heartbeat`.

        Raises:
            RequestError: with status 410 where the session is over, at which the client stops.
        """
        record = self.store.registry.open_session(tenant.name, asked.session_id)
        self._seen[record.id] = time.monotonic()
        self._idle.pop(record.id, None)
        self.store.registry.sessions.touch(tenant.name, record.id, time.time())
        return {"type": "session_heartbeat"}

    def finish_session(self, tenant: Tenant, session: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer the end of a session: its models and what was passed to its samplers are dropped; checkpoints stay."""
        record = self.store.registry.sessions.get(tenant.name, session)
        reason = body.get("reason")
        if not isinstance(reason, dict) or reason.get("type") not in ENDS:
            raise RequestError(f"reason.type must be one of {', '.join(ENDS)}")
        if record.status is None:
            detail = str(body.get("detail") or "")[:1000] or None
            status = {"type": "client_finished", "reason": {"type": reason["type"]}, "detail": detail}
            now = self.store.clock()
            self.store.registry.sessions.change(tenant.name, session, status=status, last_seen=now, ended=now)
        self._end(session, {"type": "client_finished"})
        return {}

    # what is answered later --------------------------------------------------------------------------------------------

    async def retrieve(self, tenant: Tenant, asked: types.FutureRetrieveRequest) -> Reply:
        """Answer `retrieve_future`."""
        return await self.promises.answer(tenant.name, asked.request_id, allow_metadata=asked.allow_metadata_only)

    async def retrieve_many(self, tenant: Tenant, asked: types.FuturesRetrieveRequest) -> dict[str, Any]:
        """Answer `retrieve_futures`.

        Raises:
            RequestError: there is no such sampling session.
        """
        target = asked.target
        session = self.samplers.sessions.get(target.sampling_session_id)
        if session is None or session.tenant != tenant.name:
            raise RequestError(f"sampler {target.sampling_session_id:.200} does not exist, or has expired", status=404)
        key = (target.sampling_session_id, target.cloned_sampler_id)
        return await self.promises.completions(tenant.name, key, asked.prev_cursor, asked.timeout, asked.retrieved_request_ids)

    async def load(self, tenant: Tenant, asked: types.LoadWeightsRequest) -> dict[str, Any]:
        """Answer `load_weights`, with another tenant's checkpoint where the request has its key."""
        return await self.models.load(tenant, asked, await self._source(tenant, asked.weights_access_token))

    async def create_custom_loss(self, tenant: Tenant, asked: types.CreateCustomLossRequest) -> dict[str, Any]:
        """Answer `create_custom_loss`."""
        check_open = partial(self.store.registry.open_session, tenant.name, asked.session_id)
        check_open()
        return await self.losses.create(tenant, asked, check_open)

    # copies ------------------------------------------------------------------------------------------------------------

    async def copy_weights(self, tenant: Tenant, asked: types.CopyWeightsRequest, key: str) -> dict[str, Any]:
        """Answer `copy_weights`; `key` is the same when the client asks again."""
        digest = digest_of_json(asked)
        if asked.session_id is not None:
            self.store.registry.sessions.get(tenant.name, asked.session_id)
            key = f"{asked.session_id}:train:{asked.model_seq_id}"
        known = self._copies.get(f"{tenant.name} {key}")
        if known is not None and known[0] != digest:
            raise RequestError("the copy was asked for before with other content; choose another model_seq_id")
        if known is None:
            task = asyncio.create_task(self._copy(tenant, asked))
            known = self._copies[f"{tenant.name} {key}"] = (digest, task)
            while len(self._copies) > 10_000:
                del self._copies[next(iter(self._copies))]
        return {"tinker_path": await asyncio.shield(known[1])}

    async def _copy(self, tenant: Tenant, asked: types.CopyWeightsRequest) -> str:
        source = CheckpointPath.parse(asked.source_path)
        owner = await self._source(tenant, asked.weights_access_token)
        info = self.store.find(owner.name, source)
        registry, now = self.store.registry, time.time()
        session = asked.session_id
        target = CheckpointPath(f"{session}:train:{asked.model_seq_id or 0}", source.kind, source.name)
        if session is not None and self._is_copied(tenant, source, target):
            return target.text  # before a crash, and asked for again
        if session is None:
            session = str(uuid.uuid4())
            registry.sessions.add(SessionRecord(session, tenant.name, now, project_id=asked.destination_project_id or ""))
        run = f"{session}:train:{asked.model_seq_id or 0}"
        made = info.made
        choice = choice_of(made)
        record = ServedRun(run, tenant.name, now, session, str(made.get("base_model")))
        if run in self.models.models or registry.runs.owner(run) is None:
            registry.runs.add(with_choice(record, choice))
        target = CheckpointPath(run, source.kind, source.name)
        if owner.name == tenant.name or info.public:
            await asyncio.to_thread(self.store.copy, tenant, source, target, ttl_seconds=asked.ttl_seconds)
        else:
            await asyncio.to_thread(self._copy_of_other, tenant, owner, source, target, asked.ttl_seconds)
        return target.text

    def _is_copied(self, tenant: Tenant, source: CheckpointPath, target: CheckpointPath) -> bool:
        try:
            return self.store.find(tenant.name, target).made.get("copy_of") == source.text
        except RequestError:
            return False

    def _copy_of_other(
        self, tenant: Tenant, owner: Tenant, source: CheckpointPath, target: CheckpointPath, ttl_seconds: int | None
    ) -> None:
        made = {**self.store.find(owner.name, source).made, "copy_of": source.text}
        with (
            self.store.reading(owner.name, source) as folder,
            self.store.writing(tenant, target, made, ttl_seconds=ttl_seconds) as data,
        ):
            shutil.copytree(folder, data, dirs_exist_ok=True)

    async def _source(self, tenant: Tenant, token: str | None) -> Tenant:
        """The tenant whose checkpoints a request reads: its own, or that of the key in it."""
        return tenant if token is None else await self.tenants.tenant_of(token)


def _drop_of_sessions(journal: RequestJournal, sessions: Collection[str]) -> None:
    """Forget models that could not be brought back, of sessions that are gone."""
    for model in journal.models():
        if model.partition(":")[0] in sessions:
            journal.drop(model)
