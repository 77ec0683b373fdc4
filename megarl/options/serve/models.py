"""Models of clients: requests become jobs of the trainer, in each model's order; what is refused fails in its turn."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker import types
from tinker.types import save_weights_external_request as external

from megarl.options.serve.downloads import encrypt_files
from megarl.options.serve.futures import Promise, Promises
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.registry import ServedRun
from megarl.options.serve.settings import ServiceOptions
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import Tenant, Tenants, check_models
from megarl.options.serve.values import AdamParams, AdapterChoice, Loss, RequestError
from megarl.options.serve.wire import TrainingCall, digest_of_json, passed_bytes
from megarl.options.serve.worker import PASS, REFUSED_PASS, STEP, ClientModel, Settled, TrainerWorker, TrainingJob

if TYPE_CHECKING:
    from megarl.options.serve.journal import RequestJournal
    from megarl.options.serve.sampling import PassedWeights, ServedSamplers

ExternalRequest = external.SaveWeightsExternalRequest
OfModel = Callable[[ClientModel], None]
STATE, ADAPTER = "state", "adapter"
"""Folders of a checkpoint: what training goes on from, and a PEFT folder."""


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
        journal: RequestJournal | None,
    ) -> None:
        self.most_bytes = options.max_body_bytes
        self._options, self._worker, self._promises = options, worker, promises
        self._store, self._tenants, self._samplers, self._journal = store, tenants, samplers, journal
        self._ending: set[asyncio.Task[None]] = set()
        self.models: dict[str, ClientModel] = {}
        self.losses: dict[str, tuple[str, Any]] = {}
        """By id the session and the graph of each loss that a client has defined."""

    # requests that make models -----------------------------------------------------------------------------------------

    def create(self, tenant: Tenant, asked: types.CreateModelRequest) -> dict[str, Any]:
        """Answer `create_model`, the first request of a model."""
        digest = digest_of_json(asked)
        lora = asked.lora_config
        choice = None
        if lora is not None:
            seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
            choice = AdapterChoice(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        identity = f"{asked.session_id}:train:{asked.model_seq_id}"
        model = ClientModel(identity, tenant.name, asked.session_id, asked.base_model, choice, asked.user_metadata or {})

        def check() -> None:
            self._check_new(tenant, model, asked.optimizer_config)

        return self._begin(tenant, model, digest, check, finish={"model_id": identity, "type": "create_model"})

    def load(self, tenant: Tenant, asked: types.LoadWeightsRequest, source_tenant: Tenant) -> dict[str, Any]:
        """Answer `load_weights`: of a model that is there, or as the first request of a new one."""
        digest = digest_of_json(asked)
        if asked.session_id is None:
            if asked.optimizer_config is not None:
                sentence = "optimizer_config is of new models; leave it out"
                return self.refuse(tenant, asked.model_id or "", asked.seq_id, digest, sentence)
            model = self.models.get(asked.model_id or "")
            compute = partial(self.load_into, model, source_tenant.name, asked.path, with_optimizer=asked.optimizer)
            answer = {"path": asked.path, "model_id": asked.model_id, "type": "load_weights"}
            redo = f"{source_tenant.name}\n{int(asked.optimizer)}\n{asked.path}".encode()
            return self._submit(tenant, asked.model_id or "", asked.seq_id, digest, "load", compute, _always(answer), redo=redo)
        identity = f"{asked.session_id}:train:{asked.model_seq_id}"
        model = ClientModel(identity, tenant.name, asked.session_id, asked.base_model or "", None, asked.user_metadata or {})

        def check() -> None:
            made = self._store.find(source_tenant.name, CheckpointPath.parse(asked.path)).made
            if asked.base_model is not None and asked.base_model != made.get("base_model"):
                raise RequestError(f"base_model is {asked.base_model:.200}; the checkpoint is of {made.get('base_model')}")
            model.base_model, model.choice = str(made.get("base_model")), choice_of(made)
            self._check_new(tenant, model, asked.optimizer_config or types.AdamOptimizerConfig())

        load = partial(self.load_into, model, source_tenant.name, asked.path, with_optimizer=asked.optimizer)
        finish = {"path": asked.path, "model_id": identity, "type": "load_weights"}
        redo = f"{source_tenant.name}\n{int(asked.optimizer)}\n{asked.path}".encode()
        return self._begin(tenant, model, digest, check, finish=finish, load=load, redo=redo)

    def _begin(
        self,
        tenant: Tenant,
        model: ClientModel,
        digest: bytes,
        check: Callable[[], None],
        *,
        finish: Mapping[str, Any],
        load: Callable[[], Any] | None = None,
        redo: bytes | None = None,
    ) -> dict[str, Any]:
        self._store.registry.open_session(tenant.name, model.session)
        if model.id not in self.models:
            try:
                check()
            except RequestError as error:
                return self._refused(tenant, model.id, str(error))
            self._promises.check_room()
            self.models[model.id] = model
        compute = partial(self._create, model, tenant, load, redo, digest)

        def at_error(sentence: str) -> None:
            model.lost = f"model {model.id} was not made: {sentence}"

        return self._submit(tenant, model.id, 0, digest, "create_model", compute, _always(finish), at_error=at_error)

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
        live = sum(not other.lost for other in self.models.values() if other.tenant == tenant.name)
        check_models(tenant, live)

    def _create(
        self, model: ClientModel, tenant: Tenant, load: Callable[[], Any] | None, redo: bytes | None, digest: bytes
    ) -> None:
        """Run in the trainer's thread."""
        choice = model.choice
        self._worker.trainer.create(model.id, choice)
        try:
            if load is not None:
                load()
            record = ServedRun(
                model.id, tenant.name, time.time(), model.session, model.base_model, user_metadata=model.user_metadata
            )
            runs = self._store.registry.runs
            if runs.owner(model.id) is None:  # else it was made before a crash
                runs.add(with_choice(record, choice))
            if self._journal is not None:
                self._journal.begin(model.id, facts_of(model, digest))
                if redo is not None:
                    self._journal.append(model.id, 0, f"redo:load:{digest.hex()}", redo)
        except BaseException:
            self._worker.trainer.drop(model.id)
            raise

    # training ----------------------------------------------------------------------------------------------------------

    def forward_backward(self, tenant: Tenant, call: TrainingCall, body: bytes, encoding: str) -> dict[str, Any]:
        """Answer a pass; `body` is what came, for the journal."""
        try:
            loss = self.loss_of(call)
        except RequestError as error:
            refused = REFUSED_PASS if call.backward else "refused"
            return self.refuse(tenant, call.model, call.seq, call.digest, str(error), kind=refused)
        compute = partial(self._worker.trainer.run_pass, call.model, call.data, loss, backward=call.backward)
        redo = f"{encoding}\n".encode() + body
        kind = PASS if call.backward else "forward"
        return self._submit(tenant, call.model, call.seq, call.digest, kind, compute, _passed, redo=redo)

    def loss_of(self, call: TrainingCall) -> Loss:
        """The loss of a pass; one that a client has defined with its graph.

        Raises:
            RequestError: the session of the model has no such loss.
        """
        loss, model = call.loss, self.models.get(call.model)
        if loss.name != "custom":
            return loss
        session, graph = self.losses.get(call.loss_id, ("", None))
        if model is None or session != model.session:
            raise RequestError(f"the loss {call.loss_id!r:.200} does not exist; create_custom_loss makes one")
        return Loss("custom", loss.parameters, graph)

    def optim_step(self, tenant: Tenant, asked: types.OptimStepRequest) -> dict[str, Any]:
        """Answer `optim_step`."""
        digest, params = digest_of_json(asked), asked.optim_params
        if not isinstance(params, types.AdamParams):
            sentence = f"optim_params are of {params.type:.40}; they must be AdamParams, as the model's optimizer is adamw"
            return self.refuse(tenant, asked.model_id, asked.seq_id, digest, sentence)
        adam = AdamParams(**params.model_dump())
        compute = partial(self._worker.trainer.optimizer_step, asked.model_id, adam)

        async def finish(metrics: dict[str, float]) -> Settled:
            return {"metrics": metrics, "type": "optim_step"}

        redo = params.model_dump_json().encode()
        return self._submit(tenant, asked.model_id, asked.seq_id, digest, STEP, compute, finish, redo=redo)

    def save(self, tenant: Tenant, asked: types.SaveWeightsRequest) -> dict[str, Any]:
        """Answer `save_weights`: a checkpoint that training goes on from."""
        digest = digest_of_json(asked)
        compute = partial(self._save, tenant, asked, "weights", digest)
        return self._submit_save(tenant, asked, digest, "save_weights", compute)

    def save_for_sampler(self, tenant: Tenant, asked: types.SaveWeightsForSamplerRequest) -> dict[str, Any]:
        """Answer `save_weights_for_sampler`: a checkpoint with a name, or weights for a sampling session, which is made."""
        digest, kind = digest_of_json(asked), "save_weights_for_sampler"
        if asked.path is not None or asked.sampling_session_seq_id is None:
            if asked.kind != "snapshot":
                sentence = f"kind is {asked.kind}; with a path it must be snapshot"
                return self.refuse(tenant, asked.model_id, asked.seq_id, digest, sentence)
            compute = partial(self._save, tenant, asked, "sampler_weights", digest)
            return self._submit_save(tenant, asked, digest, kind, compute)
        folder, is_inflight = self._samplers.new_folder(), asked.kind == "inflight"
        number = asked.sampling_session_seq_id

        def export() -> PassedWeights:
            model = self.models[asked.model_id]
            passed = self._samplers.to_pass(model, number, folder, is_inflight=is_inflight)
            self._worker.trainer.export(model.id, folder)
            passed.write()
            return passed

        def answer_of(passed: PassedWeights) -> Mapping[str, Any]:
            return {"sampling_session_id": passed.id, "type": kind}

        async def finish(passed: PassedWeights) -> Settled:
            await self._samplers.add_passed(passed)
            return answer_of(passed)

        return self._submit(tenant, asked.model_id, asked.seq_id, digest, kind, export, finish, answer_of=answer_of)

    def save_external(self, tenant: Tenant, asked: ExternalRequest) -> dict[str, Any]:
        """Answer `save_weights_external`: a folder to download."""
        digest, kind = digest_of_json(asked), "save_weights_external"
        compute = partial(self._save, tenant, asked, "external_weights", digest)
        return self._submit_save(tenant, asked, digest, kind, compute)

    def _submit_save(self, tenant: Tenant, asked: Any, digest: bytes, kind: str, compute: Callable[[], str]) -> dict[str, Any]:
        def answer_of(path: str) -> Mapping[str, Any]:
            return {"path": path, "type": kind}

        finish = _later(answer_of)
        return self._submit(tenant, asked.model_id, asked.seq_id, digest, kind, compute, finish, answer_of=answer_of)

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

    def load_into(self, model: ClientModel | None, tenant: str, path: str, *, with_optimizer: bool) -> None:
        """Run in the trainer's thread."""
        assert model is not None, "looked up before"
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
        model.lost = why
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
            raise RequestError(_absent(model if model is not None and model.tenant == tenant else None, identity), status=404)
        return model

    def refuse(
        self, tenant: Tenant, model: str, seq: int | None, digest: bytes, sentence: str, *, kind: str = "refused"
    ) -> dict[str, Any]:
        """Answer a request that cannot be: it fails in its turn, so that those behind it are not waited for."""

        def compute() -> None:
            raise RequestError(sentence)

        return self._submit(tenant, model, seq, digest, kind, compute, _always({}))

    def skip_overdue(self, longest_s: float) -> None:
        """Refuse requests that have waited longer than that for one before them."""
        for model in self.models.values():
            jobs, missing = model.lane.overdue(time.monotonic(), longest_s)
            if jobs:
                model.spoilt = f"request {missing} of the model did not come"
            for job in jobs:
                sentence = f"request {job.seq} waited {longest_s:.0f} s for request {missing} of its model, which did not come"
                self._promises.fail(job.promise, sentence)

    def _refused(self, tenant: Tenant, what: str, sentence: str) -> dict[str, Any]:
        """A promise of its own that has failed."""
        self._promises.check_room()
        promise = self._promises.make(f"refused:{secrets.token_hex(12)}:-1", tenant.name, b"")
        self._promises.fail(promise, sentence)
        return {"request_id": promise.id, "model_id": what}

    def _submit(
        self,
        tenant: Tenant,
        identity: str,
        seq: int | None,
        digest: bytes,
        kind: str,
        compute: Callable[[], Any],
        finish: Callable[[Any], Awaitable[Settled]],
        *,
        redo: bytes | None = None,
        answer_of: Callable[[Any], Mapping[str, Any]] | None = None,
        at_error: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """Give a request to its model's lane; returns the future that the client gets."""
        model = self.models.get(identity)
        if model is None or model.lost:
            self._store.registry.check_not_idle(tenant.name, identity)
        if model is None or model.tenant != tenant.name:
            return self._refused(tenant, identity, _absent(None, identity))
        if seq is None or seq < 0:
            return self._refused(tenant, identity, "seq_id must be a number, 1 for a model's first request and so on")
        future = {"request_id": f"{model.id}:{seq}", "model_id": model.id}
        try:
            if model.lane.is_repeated(seq, digest):
                if self._promises.known(future["request_id"]) is None:
                    raise RequestError(f"seq_id {seq} was answered before, and the answer is no longer kept")
                return future
            if model.lost:
                raise RequestError(model.lost)
        except RequestError as error:
            return self._refused(tenant, identity, str(error))
        self._promises.check_room()
        self._tenants.usage.begin(tenant)
        promise = self._promises.make(future["request_id"], tenant.name, digest, model=model.id)
        promise.at_end.append(partial(self._tenants.usage.end, tenant))
        model.used = time.monotonic()
        job = TrainingJob(model, seq, digest, kind, promise, compute, finish, redo, answer_of, at_error)
        for ready in model.lane.offer(seq, digest, job, time.monotonic()):
            self._worker.put(tenant.name, ready)
        return future


def _always(answer: Mapping[str, Any]) -> Callable[[Any], Awaitable[Settled]]:
    async def finish(_: Any) -> Settled:
        return answer

    return finish


def _later(answer_of: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], Awaitable[Settled]]:
    async def finish(value: Any) -> Settled:
        return answer_of(value)

    return finish


async def _passed(passed: Any) -> Settled:
    return await asyncio.to_thread(passed_bytes, passed)


def _absent(model: ClientModel | None, identity: str) -> str:
    return model.lost if model is not None and model.lost else f"model {identity:.200} does not exist"


def made_of(model: ClientModel) -> dict[str, Any]:
    """Return what a checkpoint says of the model that it is of."""
    choice = model.choice
    return {
        "base_model": model.base_model,
        "rank": choice.rank if choice else None,
        "seed": choice.seed if choice else None,
        "train_attn": choice.train_attn if choice else None,
        "train_mlp": choice.train_mlp if choice else None,
        "train_unembed": choice.train_unembed if choice else None,
        "optimizer": {"type": "adamw"},
    }


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
    if choice is None:
        return record
    return replace(
        record,
        rank=choice.rank,
        seed=choice.seed,
        train_attn=choice.train_attn,
        train_mlp=choice.train_mlp,
        train_unembed=choice.train_unembed,
    )
