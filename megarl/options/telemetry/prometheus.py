"""A run's state as Prometheus reads it, by prometheus-client: the metrics of the last step, and what goes well or badly.

A metric `policy/grad_norm` is served as `megarl_policy_grad_norm`: `megarl_` before it, and `_` for every character that a name
cannot have. What is about the run itself begins with `megarl_run_`, `megarl_engine_` or `megarl_ranks`. Every series has the
label `run`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from megarl.observe.run_state import ENGINE_CONDITIONS, ENGINE_IS_UP, RANK_CONDITIONS, Snapshot

OF_THE_RUN = ("run", "engine", "ranks")
"""First parts of names that no metric of a step may have."""


def prometheus_name(metric: str) -> str:
    """The name under which the metric `metric` of a step is served."""
    return "megarl_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def exposition(snapshot: Snapshot, accept: str) -> tuple[str, bytes]:
    """Content type and body of an answer to a scrape whose header `Accept` is `accept`."""
    registry = CollectorRegistry()
    registry.register(_Families(snapshot))
    encode, content_type = choose_encoder(accept)
    return content_type, encode(registry)


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Everything that is served. Of two metrics that would have one name, the first in alphabetical order has it."""
    yield from _of_run(snapshot)
    yield from _of_engines(snapshot)
    yield from _of_ranks(snapshot)
    yield from _of_guards(snapshot)
    served: dict[str, str] = {}
    for metric in sorted(snapshot.metrics):
        served.setdefault(prometheus_name(metric), metric)
    for name, metric in served.items():
        if not name.startswith(tuple(f"megarl_{part}_" for part in OF_THE_RUN)):
            yield _gauge(name, f"{metric} of the last step", snapshot, [({}, snapshot.metrics[metric])])


class _Families(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return families(self._snapshot)

    def describe(self) -> Iterator[Metric]:
        return iter(())


Series = list[tuple[Mapping[str, str], float]]


def _gauge(name: str, what: str, snapshot: Snapshot, series: Series) -> Metric:
    return _with_samples(GaugeMetricFamily(name, what), name, snapshot, series)


def _counter(name: str, what: str, snapshot: Snapshot, series: Series) -> Metric:
    return _with_samples(CounterMetricFamily(name, what), f"{name}_total", snapshot, series)


def _with_samples(family: Metric, name: str, snapshot: Snapshot, series: Series) -> Metric:
    for labels, value in series:
        family.add_sample(name, {"run": snapshot.run, **labels}, value)
    return family


def _of_run(now: Snapshot) -> Iterator[Metric]:
    def one(name: str, what: str, value: float) -> Metric:
        return _gauge(f"megarl_run_{name}", what, now, [({}, value)])

    what_it_is: Series = [({"version": now.version, "kind": now.kind}, 1)]
    yield _gauge("megarl_run_info", "version and kind of the run; always 1", now, what_it_is)
    yield one("step", "steps that are done", now.step)
    yield one("steps_planned", "steps that the run will have", now.steps)
    yield one("start_timestamp_seconds", "when the process that trains started; anew with every restart", now.started_at)
    yield one("progress_timestamp_seconds", "when a step was last finished, or later the process started", now.progress_at)
    phases: Series = [({"phase": name}, float(name == now.phase)) for name in now.phases]
    yield _gauge("megarl_run_phase", "1 for the phase that is on", now, phases)
    yield one("phase_timestamp_seconds", "when the phase that is on began", now.phase_since)
    yield _counter("megarl_run_restarts", "times that the run was started again after a failure", now, [({}, now.restarts)])
    if now.checkpoint is not None:
        yield one("checkpoint_step", "step of the newest checkpoint", now.checkpoint[0])
        yield one("checkpoint_timestamp_seconds", "when the newest checkpoint was whole", now.checkpoint[1])
    if now.disk is not None:
        yield one("disk_free_bytes", "free where the run writes", now.disk[0])
        yield one("disk_size_bytes", "size of the file system that the run writes to", now.disk[1])


def _of_engines(now: Snapshot) -> Iterator[Metric]:
    engines = now.engines
    if not engines:
        return
    up: Series = [({"engine": str(engine.number)}, float(engine.condition in ENGINE_IS_UP)) for engine in engines]
    yield _gauge("megarl_engine_up", "1 unless the engine has failed and is not back", now, up)
    states: Series = [
        ({"engine": str(engine.number), "state": state}, float(state == engine.condition))
        for engine in engines
        for state in ENGINE_CONDITIONS
    ]
    yield _gauge("megarl_engine_state", "1 for the state that the engine is in", now, states)
    versions: Series = [
        ({"engine": str(engine.number)}, engine.weight_version) for engine in engines if engine.weight_version is not None
    ]
    yield _gauge("megarl_engine_weight_version", "version of the weights that the engine serves", now, versions)
    requests: Series = [({"engine": str(engine.number)}, engine.requests) for engine in engines]
    yield _gauge("megarl_engine_requests", "requests that are under way on the engine", now, requests)
    failures: Series = [({"engine": str(engine.number)}, engine.failures) for engine in engines]
    yield _counter("megarl_engine_failures", "times that the engine failed", now, failures)


def _of_ranks(now: Snapshot) -> Iterator[Metric]:
    if now.ranks:
        counts: Series = [
            ({"group": group, "state": state}, states.count(state))
            for group, states in now.ranks.items()
            for state in RANK_CONDITIONS
        ]
        yield _gauge("megarl_ranks", "training ranks by state", now, counts)
    slow: Series = [
        ({"group": one.group, "rank": str(one.rank), "node": one.node, "phase": one.phase}, one.behind)
        for one in now.slow_ranks
    ]
    yield _gauge("megarl_ranks_slow", "share by which a phase takes a slow rank longer than its peers", now, slow)


def _of_guards(now: Snapshot) -> Iterator[Metric]:
    guards = now.guards
    skipped: Series = [({"role": role}, count) for role, count in sorted(guards.skipped.items())]
    yield _counter("megarl_run_skipped_updates", "updates that were not applied", now, skipped)
    yield _counter("megarl_run_rollbacks", "returns to the weights of a checkpoint", now, [({}, guards.rollbacks)])
    applied: Series = [({"guard": rule}, count) for rule, count in guards.applied.items()]
    yield _counter("megarl_run_guards_applied", "times that a rule of run.guards applied", now, applied)
