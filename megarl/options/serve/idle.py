"""Models of a session whose client was not heard of for long: what they have learnt is kept as checkpoints.

A model has its journal until its checkpoint is whole, so a server that is killed meanwhile does it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.errors import MegarlError
from megarl.options.serve.models import ADAPTER, STATE, made_of
from megarl.options.serve.places import CheckpointPath
from megarl.options.serve.store import CheckpointStore
from megarl.options.serve.tenants import Tenants
from megarl.options.serve.values import RequestError, Trainer
from megarl.options.serve.worker import ClientModel

KEPT_DAYS = 30
"""How long the checkpoints stay."""


def state_path(model: ClientModel) -> CheckpointPath:
    """The checkpoint of a model that its client has left."""
    return CheckpointPath(model.id, "weights", f"idle-{model.done:06d}")


def idle_sentence(session: str, idle_s: float, models: Sequence[ClientModel]) -> str:
    """Tell a client that comes back why its session is over, and what there is of its models."""
    paths = ", ".join(state_path(model).text for model in models if _was_used(model))
    kept = f"; for {KEPT_DAYS} days its models are kept as {paths}, where the quota allowed it" if paths else ""
    return f"session {session} is over, as its client was not heard of for {idle_s:.0f} s (serve.idle_session_s){kept}"


class IdleState:
    """Writes the checkpoint of a model, in the trainer's thread. One that cannot be written is told to the operator."""

    def __init__(self, store: CheckpointStore, tenants: Tenants, trainer: Trainer, say: Callable[[str], None]) -> None:
        self._store, self._tenants, self._trainer, self._say = store, tenants, trainer, say

    def __call__(self, model: ClientModel) -> None:
        """Write it, unless nothing was asked of the model; gradients since the last step are left out."""
        if not _was_used(model):
            return
        path, tenant = state_path(model), self._tenants.tenant(model.tenant)
        ttl_seconds = KEPT_DAYS * 86_400
        try:
            with self._store.writing(tenant, path, made_of(model), ttl_seconds=ttl_seconds, overwrite=True) as folder:
                self._trainer.save(model.id, folder / STATE)
                if model.choice is not None:
                    self._trainer.export(model.id, folder / ADAPTER)
        except (RequestError, MegarlError, OSError) as error:
            self._say(f"the state of the idle model {model.id} is not kept: {error}")


def _was_used(model: ClientModel) -> bool:
    return model.done > 0
