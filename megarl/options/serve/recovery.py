"""Models after a restart: each one's snapshot is loaded, and the requests behind it are computed again, before clients come."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker import types

from megarl.errors import CheckpointError, MegarlError
from megarl.options.serve.futures import JSON, Promises
from megarl.options.serve.models import ServedModels, choice_of
from megarl.options.serve.values import AdamParams, RequestError
from megarl.options.serve.wire import PROTOBUF, passed_bytes, read_call
from megarl.options.serve.worker import (
    LOAD,
    NO_STEP,
    PASS,
    STEP,
    ClientModel,
    KeptRequest,
    TrainerWorker,
    kept_request,
    spoilt_by,
)

if TYPE_CHECKING:
    from megarl.options.serve.journal import Replay, RequestJournal


async def bring_back(
    journal: RequestJournal, models: ServedModels, worker: TrainerWorker, promises: Promises, say: Callable[[str], None]
) -> None:
    """Make all models of the journal again. One that cannot be made is lost, with a word to `say` and to its client."""
    for name in journal.models():
        try:
            replay = journal.replay(name)
        except (OSError, MegarlError) as error:
            say(f"model {name} cannot be brought back: {error}")
            continue
        model = _model(name, replay)
        models.models[name] = model
        try:
            await _bring_back(model, replay, models, worker, promises)
        except Exception as error:  # noqa: BLE001 - whatever one model is lost by, the others come back
            model.lost = f"model {name} could not be brought back after a restart; load its last checkpoint"
            say(f"{model.lost}: {type(error).__name__}: {error}")


def _model(name: str, replay: Replay) -> ClientModel:
    facts = replay.facts
    model = ClientModel(
        name, facts["tenant"], facts["session"], facts["base_model"], choice_of(facts), facts.get("user_metadata") or {}
    )
    model.done = replay.seq
    model.lane.remember(0, bytes.fromhex(facts["digest"]))
    model.lane.next = replay.seq + 1
    return model


async def _bring_back(
    model: ClientModel, replay: Replay, models: ServedModels, worker: TrainerWorker, promises: Promises
) -> None:
    await worker.in_thread(partial(worker.trainer.create, model.id, model.choice))
    if replay.snapshot is not None:
        await worker.in_thread(partial(worker.trainer.load, model.id, replay.snapshot, with_optimizer=True))
    numbers: set[int] = set()
    stepped = replay.seq
    requests = [kept_request(entry) for entry in replay.entries]
    refused = {kept.seq for kept in requests if not kept.kind and kept.failed}
    for kept in requests:
        if kept.kind and kept.seq in refused:
            continue
        is_first_load = kept.kind == "load" and kept.seq == 0
        numbers.add(kept.seq)
        if kept.kind:
            settled = await worker.in_thread(partial(_computed, kept, model, models, worker))
            stepped = kept.seq if kept.kind in (STEP, NO_STEP, LOAD) else stepped
        else:
            settled = kept.content, kept.media, kept.failed
            if kept.spoils and kept.seq > stepped:  # the answer may stand behind the step's request
                model.spoilt = spoilt_by(kept.seq, json.loads(kept.content)["error"])
        model.lane.next = max(model.lane.next, kept.seq + 1)
        model.done = max(model.done, kept.seq)
        if is_first_load:
            continue
        model.lane.remember(kept.seq, kept.digest)
        identity = f"{model.id}:{kept.seq}"
        if promises.known(identity) is None:
            promise = promises.make(identity, model.tenant, kept.digest, model=model.id)
            promises.settle_again(promise, settled[0], settled[1], failed=settled[2])
    model.lane.holes = {*range(replay.seq + 1, model.lane.next)} - numbers


def _computed(kept: KeptRequest, model: ClientModel, models: ServedModels, worker: TrainerWorker) -> tuple[bytes, str, bool]:
    """Compute a request again, in the trainer's thread; returns its answer as it is sent, its type, and whether it failed."""
    try:
        answer: Any
        if kept.kind == NO_STEP:
            worker.trainer.forget_gradients(model.id)
            model.has_gradients, model.spoilt = False, ""
            raise RequestError(kept.content.decode())
        if kept.kind in (PASS, "forward"):
            encoding, _, body = kept.content.partition(b"\n")
            call = read_call(body, encoding.decode(), models.most_bytes)
            passed = worker.trainer.run_pass(model.id, call.data, models.loss_of(call), backward=call.backward)
            model.has_gradients |= call.backward
            return passed_bytes(passed), PROTOBUF, False
        if kept.kind == STEP:
            adam = AdamParams(**types.AdamParams.model_validate_json(kept.content).model_dump())
            answer = {"metrics": worker.trainer.optimizer_step(model.id, adam), "type": "optim_step"}
        else:
            tenant, with_optimizer, path = kept.content.decode().split("\n")
            try:
                models.load_into(model, tenant, path, with_optimizer=with_optimizer == "1")
            except RequestError as error:  # what it was is gone, so the model is
                raise CheckpointError(str(error)) from None
            answer = {"path": path, "model_id": model.id, "type": "load_weights"}
        model.has_gradients, model.spoilt = False, ""
        return json.dumps(answer).encode(), JSON, False
    except RequestError as error:
        model.spoilt = spoilt_by(kept.seq, str(error)) if kept.kind == PASS else model.spoilt
        return json.dumps({"error": str(error), "category": "user"}).encode(), JSON, True
