"""Models after a restart: each one's snapshot is loaded, and the requests behind it have their turns again before new ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.errors import DeadlineError, MegarlError, WorkerError
from megarl.options.serve.futures import Promises
from megarl.options.serve.models import ServedModels, choice_of
from megarl.options.serve.requests import refusal
from megarl.options.serve.values import RequestError
from megarl.options.serve.worker import (
    PASS,
    REFUSED,
    REFUSED_PASS,
    REFUSED_STEP,
    STEP,
    ClientModel,
    KeptRequest,
    TrainerWorker,
    Work,
    kept_requests,
)

if TYPE_CHECKING:
    from megarl.options.serve.journal import Replay, RequestJournal

STATE_KINDS = ("create_model", "load", "forward_backward", "optim_step")
"""Kinds of requests that a model is made by."""


async def bring_back(
    journal: RequestJournal,
    models: ServedModels,
    worker: TrainerWorker,
    promises: Promises,
    is_over: Callable[[str, str], bool],
) -> None:
    """Make all models of the journal again. One that cannot be made is lost, with a word to its client and to the operator.

    `is_over`: whether the session of a tenant is; its models are forgotten, which the server before did not come to.

    Raises:
        WorkerError, DeadlineError: ranks are lost, and no model is.
    """
    for name in journal.models():
        try:
            replay = await worker.on_disk(partial(journal.replay, name))
            model = _model(name, replay)
        except (OSError, MegarlError, LookupError) as error:
            worker.say(f"model {name} cannot be brought back: {error}")
            continue
        if is_over(model.tenant, model.session):
            await worker.on_disk(partial(journal.drop, name))
            continue
        models.models[name] = model
        try:
            await _bring_back(model, replay, models, worker, promises)
        except (WorkerError, DeadlineError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever one model is lost by, the others come back
            _lose(model, error, worker)


def _lose(model: ClientModel, error: Exception, worker: TrainerWorker) -> None:
    model.lost = f"model {model.id} could not be brought back after a restart; load its last checkpoint"
    worker.say(f"{model.lost}: {type(error).__name__}: {error}")


def _model(name: str, replay: Replay) -> ClientModel:
    facts = replay.facts
    model = ClientModel(
        name, facts["tenant"], facts["session"], facts["base_model"], choice_of(facts), facts.get("user_metadata") or {}
    )
    model.lane.remember(0, bytes.fromhex(facts["digest"]))
    if replay.snapshot is not None:
        model.done, model.lane.next = replay.seq, replay.seq + 1
    return model


async def _bring_back(
    model: ClientModel, replay: Replay, models: ServedModels, worker: TrainerWorker, promises: Promises
) -> None:
    if replay.snapshot is not None:
        await worker.in_thread(partial(worker.trainer.create, model.id, model.choice))
        await worker.in_thread(partial(worker.trainer.load, model.id, replay.snapshot, with_optimizer=True))
    requests, done = kept_requests(replay.entries)
    if replay.snapshot is None and not any(kept.seq == 0 and kept.kind for kept in requests):
        raise LookupError("the journal does not say how it was made")
    done = max([done, *(kept.seq for kept in requests if kept.answer is not None)])
    for kept in requests:
        promise = promises.make(f"{model.id}:{kept.seq}", model.tenant, kept.digest, model=model.id)
        promise.taken.set()
        if not kept.kind:  # its effect, if it had one, is in the snapshot
            model.lane.remember(kept.seq, kept.digest)
            promises.settle_again(promise, kept.answer or b"", kept.media, failed=kept.failed)
            continue
        model.lane.next = max(model.lane.next, min(kept.seq, done + 1))  # what is missing was given up already, or trimmed
        is_answered = kept.answer is not None and (kept.failed or kept.kind not in STATE_KINDS)
        work = _done_before(kept) if is_answered else _done_again(model, kept, models, worker)
        models.requests.offer(model, kept.seq, kept.digest, promise, work)
    model.lane.next = max(model.lane.next, done + 1)


def _done_before(kept: KeptRequest) -> Work:
    """The work of a request whose answer is known."""
    answer: Any = json.loads(kept.answer or b"{}")
    if kept.failed:
        kinds = {PASS: REFUSED_PASS, REFUSED_PASS: REFUSED_PASS, STEP: REFUSED_STEP}
        return refusal(str(answer.get("error")), kinds.get(kept.kind, REFUSED))

    async def finish(_: None) -> Any:
        return answer

    return Work("answered", lambda: None, finish)


def _done_again(model: ClientModel, kept: KeptRequest, models: ServedModels, worker: TrainerWorker) -> Work:
    """The work of a request that is computed, again or for the first time; where its effect is lost, the model is."""
    work = models.work_again(model, kept)
    compute = work.compute

    def guarded() -> Any:
        try:
            return compute()
        except (WorkerError, DeadlineError):
            raise
        except Exception as error:
            is_refused = isinstance(error, RequestError) and kept.kind not in ("create_model", "load")
            if is_refused or kept.kind not in STATE_KINDS:
                raise
            _lose(model, error, worker)
            raise RequestError(model.lost) from None

    work.compute, work.at_error = guarded, None
    return work
