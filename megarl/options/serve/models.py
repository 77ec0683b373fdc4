"""Models of clients: requests become jobs of the trainer, in each model's order; what is refused fails in its turn."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from tinker import types
from tinker.types import save_weights_external_request as external

from megarl.errors import CheckpointError, DeadlineError, WorkerError
from megarl.options.serve.custom_losses import CustomLosses
from megarl.options.serve.downloads import encrypt_files
from megarl.options.serve.futures import Promise, Promises
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import ServedRun
from megarl.options.serve.requests import ModelRequests, absent, refusal
from megarl.options.serve.settings import ServiceOptions
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import HeldBytes, Tenant, Tenants, check_models
from megarl.options.serve.values import AdamParams, AdapterChoice, Loss, RequestError
from megarl.options.serve.wire import TrainingCall, digest_of_json, passed_bytes, read_call, read_json
from megarl.options.serve.worker import REFUSED, REFUSED_PASS, ClientModel, KeptRequest, Settled, TrainerWorker, Work, answering

if TYPE_CHECKING:
    from megarl.options.serve.journal import Content, RequestJournal
    from megarl.options.serve.sampling import ServedSamplers
    from megarl.options.serve.sampling_sessions import PassedWeights

ExternalRequest = external.SaveWeightsExternalRequest
OfModel = Callable[[ClientModel], None]
STATE, ADAPTER = "state", "adapter"
"""Folders of a checkpoint: what training goes on from, and a PEFT folder."""
SAVES: Mapping[str, tuple[type[BaseModel], str]] = {
    "save_weights": (types.SaveWeightsRequest, "weights"),
    "save_weights_for_sampler": (types.SaveWeightsForSamplerRequest, "sampler_weights"),
    "save_weights_external": (ExternalRequest, "external_weights"),
}
"""By kind of request its type, and the kind of checkpoint that it writes."""


class ServedModels:
    """All models of a server. Everything here is called in one event loop; what computes, it gives to the worker."""

    def __init__(
        self,
        options: ServiceOptions,
        worker: TrainerWorker,
        promises: Promises,
        store: CheckpointStore,
        tenants: Tenants,
        samplers: ServedSamplers,
        losses: CustomLosses,
        journal: RequestJournal | None,
    ) -> None:
        self.most_bytes = options.max_body_bytes
        self._options, self._worker, self._promises = options, worker, promises
        self._store, self._tenants, self._samplers, self._journal = store, tenants, samplers, journal
        self._ending: set[asyncio.Task[None]] = set()
        self.models: dict[str, ClientModel] = {}
        self.held = HeldBytes(options.tenant_bytes)
        self.requests = ModelRequests(self.models, worker, promises, tenants, self.held, journal)
        self.requests.check_open = store.registry.check_not_idle
        self._losses = losses
        self.make_room: Callable[[str], bool] = lambda tenant: False
        """Ends the session of a tenant whose client is idle; returns whether there was one."""

    # requests that make models -----------------------------------------------------------------------------------------

    async def create(self, tenant: Tenant, asked: types.CreateModelRequest) -> dict[str, Any]:
        """Answer `create_model`, the first request of a model."""
        digest, lora = digest_of_json(asked), asked.lora_config
        choice = None
        if lora is not None:
            seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
            choice = AdapterChoice(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        identity = f"{asked.session_id}:train:{asked.model_seq_id}"
        model = ClientModel(identity, tenant.name, asked.session_id, asked.base_model, choice, asked.user_metadata or {})

        def check() -> None:
            self._check_new(tenant, model, asked.optimizer_config)

        return await self._begin(tenant, model, digest, check, "create_model", b"")

    async def load(self, tenant: Tenant, asked: types.LoadWeightsRequest, source_tenant: Tenant) -> dict[str, Any]:
        """Answer `load_weights`: of a model that is there, or as the first request of a new one."""
        digest = digest_of_json(asked)
        redo = f"{source_tenant.name}\n{int(asked.optimizer)}\n{asked.path}".encode()
        if asked.session_id is None:
            if asked.optimizer_config is not None:
                sentence = "optimizer_config is of new models; leave it out"
                return await self.requests.refuse(tenant, asked.model_id or "", asked.seq_id, digest, sentence)
            work = self._load_work(asked.model_id or "", redo)
            return await self.requests.submit(tenant, asked.model_id or "", asked.seq_id, digest, work, redo)
        identity = f"{asked.session_id}:train:{asked.model_seq_id}"
        model = ClientModel(identity, tenant.name, asked.session_id, asked.base_model or "", None, asked.user_metadata or {})

        def check() -> None:
            made = self._store.find(source_tenant.name, CheckpointPath.parse(asked.path)).made
            if asked.base_model is not None and asked.base_model != made.get("base_model"):
                raise RequestError(f"base_model is {asked.base_model:.200}; the checkpoint is of {made.get('base_model')}")
            model.base_model, model.choice = str(made.get("base_model")), choice_of(made)
            self._check_new(tenant, model, asked.optimizer_config or types.AdamOptimizerConfig())

        return await self._begin(tenant, model, digest, check, "load", redo)

    async def _begin(
        self, tenant: Tenant, model: ClientModel, digest: bytes, check: Callable[[], None], kind: str, redo: bytes
    ) -> dict[str, Any]:
        self._store.registry.open_session(tenant.name, model.session)
        facts = None
        if model.id not in self.models:
            try:
                check()
            except RequestError as error:
                return self.requests.refused(tenant, model.id, str(error))
            self._promises.check_room(tenant.name)
            self.models[model.id], facts = model, facts_of(model, digest)
        try:
            return await self.requests.submit(
                tenant, model.id, 0, digest, self._first_work(model, kind, redo), redo, facts=facts
            )
        except RequestError:
            if facts is not None:  # nothing of it was taken
                del self.models[model.id]
            raise

    def _first_work(self, model: ClientModel, kind: str, redo: bytes) -> Work:
        """Make a model, with a checkpoint's state where `kind` is load."""
        loads = self._load_work(model.id, redo) if kind == "load" else None

        def at_error(sentence: str) -> None:
            model.lost = f"model {model.id} was not made: {sentence}"
            if self._journal is not None:
                self._journal.drop(model.id)

        finish = loads.finish if loads is not None else answering({"model_id": model.id, "type": "create_model"})
        compute = partial(self._create, model, loads.compute if loads is not None else None)
        return Work(kind, compute, finish, at_error=at_error)

    def _check_new(self, tenant: Tenant, model: ClientModel, optimizer: Any) -> None:
        options, choice = self._options, model.choice
        if model.base_model not in options.models:
            raise RequestError(f"base_model is {model.base_model:.200}; it must be one of {', '.join(options.models)}")
        if optimizer.type != "adamw":
            raise RequestError(f"optimizer_config.type is {optimizer.type:.40}; it must be adamw")
        if choice is None and not options.full_weights:
            raise RequestError(
                "lora_config is missing: this server trains adapters, and all weights where serve.full_weights is set"
            )
        if choice is not None and options.full_weights:
            raise RequestError("lora_config must be left out: this server trains all weights of a model (serve.full_weights)")
        if choice is not None and not 1 <= choice.rank <= options.max_rank:
            raise RequestError(f"lora_config.rank is {choice.rank}; it must be from 1 to {options.max_rank}")
        if choice is not None and not (choice.train_attn or choice.train_mlp or choice.train_unembed):
            raise RequestError("lora_config trains nothing: train_attn, train_mlp or train_unembed must be true")
        try:
            check_models(tenant, sum(other.tenant == tenant.name and not other.lost for other in self.models.values()))
        except RequestError:
            if not self.make_room(tenant.name):
                raise

    def _create(self, model: ClientModel, load: Callable[[], Any] | None) -> None:
        """Run in the trainer's thread."""
        self._worker.trainer.create(model.id, model.choice)
        try:
            if load is not None:
                load()
            record = ServedRun(
                model.id, model.tenant, time.time(), model.session, model.base_model, user_metadata=model.user_metadata
            )
            runs = self._store.registry.runs
            if runs.owner(model.id) is None:  # else it was made before a crash
                runs.add(with_choice(record, model.choice))
        except (WorkerError, DeadlineError):
            raise
        except BaseException:
            self._worker.trainer.drop(model.id)
            raise

    # training ----------------------------------------------------------------------------------------------------------

    async def forward_backward(self, tenant: Tenant, call: TrainingCall, body: bytes, encoding: str) -> dict[str, Any]:
        """Answer a pass; `body` is what came, for the journal."""
        try:
            loss = self.loss_of(call)
        except RequestError as error:
            kind = REFUSED_PASS if call.backward else REFUSED
            return await self.requests.refuse(tenant, call.model, call.seq, call.digest, str(error), kind=kind)
        redo = f"{encoding}\n".encode() + body

        def compute() -> Any:
            if call.backward:
                self._check_passes(call.model, len(redo))
            return self._worker.trainer.run_pass(call.model, call.data, loss, backward=call.backward)

        size = sum(datum.tokens.nbytes + sum(array.nbytes for array in datum.inputs.values()) for datum in call.data)
        work = Work("forward_backward" if call.backward else "forward", compute, _passed, size=len(redo))
        return await self.requests.submit(tenant, call.model, call.seq, call.digest, work, redo, size=size)

    def _check_passes(self, identity: str, size: int) -> None:
        """Refuse a pass with whose body the journal would have too much that no step or snapshot ends."""
        model, most = self.models[identity], self._options.max_step_bytes
        if model.passes and model.pass_bytes + size > most:
            raise RequestError(
                f"{len(model.passes)} forward_backward since the last optim_step have {model.pass_bytes} bytes, and with this "
                f"one more than {most} (serve.max_step_bytes), the most that a model may have; send optim_step earlier"
            )

    def _pass_again(self, redo: Content) -> Any:
        """Run in the trainer's thread, where the body is read too."""
        encoding, _, body = bytes(redo).partition(b"\n")
        call = read_call(body, encoding.decode(), self.most_bytes)
        return self._worker.trainer.run_pass(call.model, call.data, self.loss_of(call), backward=call.backward)

    def loss_of(self, call: TrainingCall) -> Loss:
        """The loss of a pass; one that a client has defined with its graph.

        Raises:
            RequestError: the session of the model has no such loss.
        """
        loss, model = call.loss, self.models.get(call.model)
        if loss.name != "custom":
            return loss
        return Loss("custom", loss.parameters, self._losses.find(call.loss_id, model.session if model is not None else None))

    async def optim_step(self, tenant: Tenant, asked: types.OptimStepRequest) -> dict[str, Any]:
        """Answer `optim_step`."""
        digest, params = digest_of_json(asked), asked.optim_params
        if not isinstance(params, types.AdamParams):
            sentence = f"optim_params are of {params.type:.40}; they must be AdamParams, as the model's optimizer is adamw"
            return await self.requests.refuse(tenant, asked.model_id, asked.seq_id, digest, sentence)
        work = self._step_work(asked.model_id, redo := params.model_dump_json().encode())
        return await self.requests.submit(tenant, asked.model_id, asked.seq_id, digest, work, redo)

    def _step_work(self, model: str, redo: bytes) -> Work:
        adam = AdamParams(**types.AdamParams.model_validate_json(redo).model_dump())

        async def finish(metrics: dict[str, float]) -> Settled:
            return {"metrics": metrics, "type": "optim_step"}

        return Work("optim_step", partial(self._worker.trainer.optimizer_step, model, adam), finish)

    async def save(self, tenant: Tenant, asked: types.SaveWeightsRequest) -> dict[str, Any]:
        """Answer `save_weights`: a checkpoint that training goes on from."""
        return await self._submit_save(tenant, asked, "save_weights")

    async def save_for_sampler(self, tenant: Tenant, asked: types.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        """Answer `save_weights_for_sampler`: a checkpoint with a name, or weights for a sampling session, which is made."""
        if (asked.path is not None or asked.sampling_session_seq_id is None) and asked.kind != "snapshot":
            sentence = f"kind is {asked.kind}; with a path it must be snapshot"
            return await self.requests.refuse(tenant, asked.model_id, asked.seq_id, digest_of_json(asked), sentence)
        return await self._submit_save(tenant, asked, "save_weights_for_sampler")

    async def save_external(self, tenant: Tenant, asked: ExternalRequest) -> dict[str, Any]:
        """Answer `save_weights_external`: a folder to download."""
        return await self._submit_save(tenant, asked, "save_weights_external")

    async def _submit_save(self, tenant: Tenant, asked: Any, kind: str) -> dict[str, Any]:
        # a client that sends the request again counts its sampling session anew
        digest = digest_of_json(asked, but={"sampling_session_seq_id"} if kind == "save_weights_for_sampler" else None)
        work, redo = self._save_work(tenant, kind, asked, digest), asked.model_dump_json().encode()
        return await self.requests.submit(tenant, asked.model_id, asked.seq_id, digest, work, redo)

    def _save_work(self, tenant: Tenant, kind: str, asked: Any, digest: bytes) -> Work:
        if kind == "save_weights_for_sampler" and asked.path is None and asked.sampling_session_seq_id is not None:
            return self._pass_work(asked, digest)

        def answer_of(path: str) -> Mapping[str, Any]:
            return {"path": path, "type": kind}

        compute = partial(self._save, tenant, asked, SAVES[kind][1], digest)
        return Work(kind, compute, _later(answer_of), answer_of)

    def _pass_work(self, asked: types.SaveWeightsForSamplerRequest, digest: bytes) -> Work:
        """Weights for a sampling session, which is made."""
        folder, is_inflight = self._samplers.new_folder(), asked.kind == "inflight"
        number, kind = asked.sampling_session_seq_id or 0, "save_weights_for_sampler"

        def export() -> PassedWeights:
            model = self.models[asked.model_id]
            passed = self._samplers.to_pass(model, number, folder, digest, is_inflight=is_inflight)
            if not passed.is_there:
                self._worker.trainer.export(model.id, folder)
                passed.write()
            return passed

        def answer_of(passed: PassedWeights) -> Mapping[str, Any]:
            return {"sampling_session_id": passed.id, "type": kind}

        async def finish(passed: PassedWeights) -> Settled:
            if not passed.is_there:
                await self._samplers.add_passed(passed)
                model = self.models.get(passed.model)
                if model is None or model.lost:  # it was dropped while engines loaded them
                    self._samplers.drop_model(passed.model)
            return answer_of(passed)

        return Work(kind, export, finish, answer_of)

    def _save(self, tenant: Tenant, asked: Any, kind: str, digest: bytes) -> str:
        """Run in the trainer's thread; returns the path."""
        model, trainer = self.models[asked.model_id], self._worker.trainer
        path = CheckpointPath(model.id, kind, asked.path or f"{asked.seq_id:06d}")
        try:
            if self._store.find(tenant.name, path).made.get("request") == digest.hex():
                return path.text  # written before a crash, and asked for again
        except RequestError:
            pass
        terms = {"ttl_seconds": asked.ttl_seconds, "user_metadata": getattr(asked, "user_metadata", None)}
        made = {**made_of(model), "request": digest.hex()}
        with self._store.writing(tenant, path, made, overwrite=getattr(asked, "overwrite", False), **terms) as folder:
            if kind == "weights":
                trainer.save(model.id, folder / STATE)
            if kind == "external_weights":
                trainer.export(model.id, folder / ADAPTER)
                for file in (folder / ADAPTER).iterdir():
                    file.rename(folder / file.name)
                (folder / ADAPTER).rmdir()
                if asked.age_encryption_recipients:
                    encrypt_files(folder, asked.age_encryption_recipients)
            elif model.choice is not None or kind == "sampler_weights":
                trainer.export(model.id, folder / ADAPTER)
        return path.text

    def _load_work(self, model: str, redo: bytes) -> Work:
        tenant, with_optimizer, path = redo.decode().split("\n")

        def compute() -> None:
            self._load_into(self.models[model], tenant, path, with_optimizer=with_optimizer == "1")

        return Work("load", compute, answering({"path": path, "model_id": model, "type": "load_weights"}))

    def work_again(self, model: ClientModel, kept: KeptRequest) -> Work:
        """The work of a request that a journal has.

        Raises:
            CheckpointError: there is no such kind.
            RequestError: the request is none.
        """
        if kept.kind in ("forward_backward", "forward"):
            return Work(kept.kind, partial(self._pass_again, kept.content), _passed, size=len(kept.content))
        content = bytes(kept.content)
        if kept.kind == "optim_step":
            return self._step_work(model.id, content)
        if kept.seq == 0:
            return self._first_work(model, kept.kind, content)
        if kept.kind == "load":
            return self._load_work(model.id, content)
        if kept.kind in (REFUSED, REFUSED_PASS):
            return refusal(content.decode(), kept.kind)
        if kept.kind in SAVES:
            asked = read_json(SAVES[kept.kind][0], content)
            return self._save_work(self._tenants.tenant(model.tenant), kept.kind, asked, kept.digest)
        raise CheckpointError(f"the journal has a request of the kind {kept.kind!r}, which this server does not write")

    def _load_into(self, model: ClientModel, tenant: str, path: str, *, with_optimizer: bool) -> None:
        """Run in the trainer's thread."""
        place = CheckpointPath.parse(path)
        made = self._store.find(tenant, place).made
        if place.kind != "weights":
            raise RequestError(f"{path:.300} cannot be trained on; a path to load must be tinker://RUN/weights/NAME")
        wanted = made_of(model)
        for name in ("base_model", "rank", "train_attn", "train_mlp", "train_unembed"):
            if made.get(name) != wanted[name]:
                raise RequestError(
                    f"{path:.300} has {name} {made.get(name)}, and the model {wanted[name]}; they must be the same"
                )
        with self._store.reading(tenant, place) as folder:
            self._worker.trainer.load(model.id, folder / STATE, with_optimizer=with_optimizer)

    # the rest ----------------------------------------------------------------------------------------------------------

    def unload(self, tenant: Tenant, asked: types.UnloadModelRequest) -> dict[str, Any]:
        """Answer `unload_model`; requests of the model that wait are refused."""
        model = self.find(tenant.name, asked.model_id)
        promise = self._promises.make(f"{model.id}:unload:{secrets.token_hex(8)}:-1", tenant.name, b"", model="")
        self.drop(model, f"model {model.id} was unloaded", promise)
        return {"request_id": promise.id, "model_id": model.id}

    def drop(self, model: ClientModel, why: str, promise: Promise | None = None, first: OfModel | None = None) -> None:
        """Forget a model in the trainer and in the journal, behind what `first` does in the trainer's thread."""
        waiting = model.lane.take_all()
        model.lost, model.used = why, time.monotonic()
        with suppress(RequestError):  # it was not made
            self._store.registry.runs.touch(model.tenant, model.id, self._store.clock())
        for job in waiting:
            self._promises.fail(job.promise, why)

        async def end() -> None:
            try:
                await self._worker.in_thread(partial(self._forget, model, first))
            except Exception as error:  # noqa: BLE001 - whatever the trainer raises, the promise is settled
                if promise is not None:
                    self._promises.fail(promise, f"the server could not unload it: {type(error).__name__}", "server")
            if promise is not None:
                self._promises.keep(promise, {"model_id": model.id, "type": "unload_model"})

        self._samplers.drop_model(model.id)
        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def forget_lost(self, after_s: float) -> None:
        """Forget, after some time, that there were models that are gone."""
        before = time.monotonic() - after_s
        for identity in [name for name, model in self.models.items() if model.lost and model.used < before]:
            del self.models[identity]

    def _forget(self, model: ClientModel, first: OfModel | None) -> None:
        if first is not None:
            first(model)
        self._worker.trainer.drop(model.id)
        if self._journal is not None:
            self._journal.drop(model.id)

    def info(self, tenant: Tenant, asked: types.GetInfoRequest) -> dict[str, Any]:
        """Answer `get_info`."""
        model = self.find(tenant.name, asked.model_id)
        return {
            "type": "get_info",
            "model_data": {"arch": "megarl", "model_name": model.base_model},
            "model_id": model.id,
            "is_lora": model.choice is not None,
            "lora_rank": model.choice.rank if model.choice is not None else None,
            "model_name": model.base_model,
        }

    def find(self, tenant: str, identity: str) -> ClientModel:
        """The tenant's model of that id.

        Raises:
            RequestError: with status 404, also where it is another tenant's; 410 where its session was idle.
        """
        model = self.models.get(identity)
        if model is None or model.tenant != tenant or model.lost:
            self._store.registry.check_not_idle(tenant, identity)
            raise RequestError(absent(model if model is not None and model.tenant == tenant else None, identity), status=404)
        return model


def _later(answer_of: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], Awaitable[Settled]]:
    async def finish(value: Any) -> Settled:
        return answer_of(value)

    return finish


async def _passed(passed: Any) -> Settled:
    return await asyncio.to_thread(passed_bytes, passed)


def made_of(model: ClientModel) -> dict[str, Any]:
    """Return what a checkpoint says of the model that it is of."""
    chosen = {field.name: getattr(model.choice, field.name, None) for field in fields(AdapterChoice)}
    return {"base_model": model.base_model, **chosen, "optimizer": {"type": "adamw"}}


def choice_of(made: Mapping[str, Any]) -> AdapterChoice | None:
    """The adapters of the model that a checkpoint is of."""
    if made.get("rank") is None:
        return None
    switches = (bool(made.get(name)) for name in ("train_attn", "train_mlp", "train_unembed"))
    return AdapterChoice(int(made["rank"]), int(made.get("seed") or 0), *switches)


def facts_of(model: ClientModel, digest: bytes) -> dict[str, Any]:
    """Return what a journal says of its model."""
    return {
        **made_of(model),
        "tenant": model.tenant,
        "session": model.session,
        "user_metadata": dict(model.user_metadata),
        "digest": digest.hex(),
    }


def with_choice(record: ServedRun, choice: AdapterChoice | None) -> ServedRun:
    """The record of a training run with the adapters of its model."""
    return record if choice is None else replace(record, **asdict(choice))
