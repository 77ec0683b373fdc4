"""Records of what is over: they are forgotten once nothing refers to them, so that a server may live for years."""

from __future__ import annotations

from collections.abc import Collection

from megarl.options.serve.store import CheckpointStore

KEPT_S = 30 * 86_400.0
"""How long records of sessions, training runs and samplers stay after the last sign of life, in seconds: as long as the
checkpoints of models that their client has left."""


def forget_old(
    store: CheckpointStore, *, sessions: Collection[str], models: Collection[str], samplers: Collection[str]
) -> list[str]:
    """Remove records, in memory and on disk, that are old, of nothing that is live, and of no checkpoint.

    A session stays as long as one of its training runs, and a training run as long as it has a checkpoint.
    `sessions`, `models`, `samplers`: ids of those that are live. Returns the sessions that are gone.
    """
    registry, before = store.registry, store.clock() - KEPT_S
    with_checkpoints = store.runs()
    for run in registry.runs.all():
        if max(run.created, run.last_seen) < before and run.id not in models and run.id not in with_checkpoints:
            registry.runs.remove(run.id)
            store.forget_run(run.id)
    for sampler in registry.samplers.all():
        if max(sampler.created, sampler.last_used) < before and sampler.id not in samplers:
            registry.samplers.remove(sampler.id)
    with_runs = {run.session for run in registry.runs.all()}
    old = [record for record in registry.sessions.all() if max(record.created, record.last_seen, record.ended) < before]
    gone = [record.id for record in old if record.id not in sessions and record.id not in with_runs]
    for session in gone:
        registry.sessions.remove(session)
    return gone
