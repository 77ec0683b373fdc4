"""Ray for one run: start or join it, reserve the places, put one actor on each, and take down what was started.

Only processes that this run started are ever ended, each by its own handle.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import megarl.platform
from megarl.config.layout import Layout
from megarl.errors import ClusterError
from megarl.workers import engine_actor
from megarl.workers.group import WorkerGroup
from megarl.workers.rank_actor import RankActor

EngineActor: Any = engine_actor.EngineActor
SHUTDOWN_S = 180.0
_TOKEN_HINT = "; one that wants a token answers only if RAY_AUTH_MODE=token is set here too"


@dataclass(frozen=True)
class GroupRequest:
    """A group of training ranks to place: its name, layout and CPU threads per rank."""

    name: str
    layout: Layout
    threads: int | None


@dataclass(frozen=True)
class Places:
    """Which bundle each rank gets: `ranks[name][rank]` and `engines[i]` are bundle numbers below `bundles`."""

    bundles: int
    ranks: dict[str, list[int]]
    engines: list[int]
    stacked: int


def assign_places(requests: Sequence[GroupRequest], engines: int, engine_tp: int, *, colocated: bool) -> Places:
    """Bundles for every rank and engine. Colocated: all start at bundle 0 and share. Separate: one after the other.

    With `engine_tp` 0 the engines are elsewhere, and take no room here.
    """
    sizes = {request.name: request.layout.world_size for request in requests}
    ranks, start = {}, 0
    for name, size in sizes.items():
        ranks[name] = list(range(start, start + size))
        start += 0 if colocated else size
    engine_bundles = [start + i * engine_tp if engine_tp else 0 for i in range(engines)]
    total = max([*sizes.values(), engines * engine_tp]) if colocated else start + engines * engine_tp
    return Places(total, ranks, engine_bundles, len(requests) + 1 if colocated else 1)


class Cluster:
    """The Ray side of a run, as a context manager: leaving it ends every actor and the Ray that it started."""

    def __init__(
        self,
        requests: Sequence[GroupRequest],
        *,
        engines: int,
        engine_tp: int,
        colocated: bool,
        ray_address: str | None,
        log_folder: str,
        start_deadline_s: float,
        architecture: str | None = None,
    ) -> None:
        """`architecture`: the import path of the user's own, which every process of the run must know."""
        self.requests = list(requests)
        self.platform = megarl.platform.detect()
        self.places = assign_places(requests, engines, engine_tp, colocated=colocated)
        self.engine_tp = engine_tp
        self.address = ray_address or os.environ.get("RAY_ADDRESS")
        self.log_folder = os.path.abspath(log_folder)
        self.start_deadline_s = start_deadline_s
        self.architecture = architecture
        self.groups: dict[str, WorkerGroup] = {}
        self.engines: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._owns_ray = False

    def __enter__(self) -> Cluster:
        try:
            self._join_ray()
            self._reserve()
        except BaseException:
            self.shutdown()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def start_groups(self, seed: int) -> Mapping[str, WorkerGroup]:
        """Start every group's ranks and bring their worlds up."""
        for request in self.requests:
            threads = request.threads or self._fair_threads(request.layout.world_size)
            actors = [
                RankActor.options(**self._where(bundle, threads)).remote(
                    self.log_folder, request.name, rank, request.layout, threads, self.architecture
                )
                for rank, bundle in enumerate(self.places.ranks[request.name])
            ]
            self.groups[request.name] = WorkerGroup(request.name, request.layout, actors, self.log_folder)
        for group in self.groups.values():
            group.connect(seed=seed, deadline_s=self.start_deadline_s)
        return self.groups

    def start_engines(self, path: str, model_path: str, options: Sequence[dict[str, Any]], threads: int) -> list[Any]:
        """Create one actor per entry of `options` for engines of the class at `path`; they start their engines when asked."""
        self.engines = [
            EngineActor.options(**self._where(bundle, threads)).remote(path, model_path, option, self.architecture)
            for bundle, option in zip(self.places.engines, options, strict=True)
        ]
        return self.engines

    def shutdown(self) -> None:
        """End engines, ranks and, if this run started it, Ray; safe to call twice.

        If that is not done in time this process ends itself, with its stacks on stderr, and all of them with it.
        """
        if not ray.is_initialized():
            return
        # with a Ray that is half gone some of these calls may not return
        faulthandler.dump_traceback_later(SHUTDOWN_S, exit=True, file=2)
        try:
            self._end_all()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end_all(self) -> None:
        if self.engines:
            stops = [engine.stop.remote() for engine in self.engines]
            ray.wait(stops, num_returns=len(stops), timeout=30)
        for engine in self.engines:
            ray.kill(engine, no_restart=True)
        for group in self.groups.values():
            group.kill()
        self.engines, self.groups = [], {}
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _join_ray(self) -> None:
        if ray.is_initialized():
            return
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._init_ray()
        finally:  # Ray ends the driver at once on SIGTERM, but the run has its own way of stopping
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)

    def _init_ray(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # else other programs on a small machine starve the run
        if self.address:
            try:
                ray.init(address=self.address, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                hint = "" if "RAY_AUTH_MODE" in os.environ else _TOKEN_HINT
                raise ClusterError(
                    f"resources.ray_address is '{self.address}', but no Ray cluster answers there ({error}); "
                    f"start one, or leave it empty for a local Ray{hint}"
                ) from error
        else:
            # On a CPU machine more ranks than cores may share the cores: places are counted, not cores.
            cores = max(self.cores, self.places.bundles) if self.platform.name == "cpu" else None
            # Its GCS never comes back: who has lost it need not try for a minute.
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # every actor has an environment of its own
            ray.init(address="local", num_cpus=cores, include_dashboard=False, object_store_memory=512 * 2**20, **quiet)
        self._owns_ray = True

    def _reserve(self) -> None:
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if self.platform.name == "cuda" else {})
        self._placement = placement_group([bundle] * self.places.bundles, strategy="PACK")
        if not self._placement.wait(timeout_seconds=self.start_deadline_s):
            have = ray.cluster_resources()
            raise ClusterError(
                f"the layouts need {self.places.bundles} places with {bundle} each, but the Ray cluster has "
                f"{have.get('CPU', 0):.0f} CPUs and {have.get('GPU', 0):.0f} GPUs; use smaller layouts or "
                "resources.placement=colocated"
            )

    def _where(self, bundle: int, threads: int) -> dict[str, Any]:
        share = math.floor(10_000 / self.places.stacked) / 10_000
        return {
            "num_cpus": share,
            "num_gpus": share if self.platform.name == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle),
            "runtime_env": {"env_vars": self.platform.worker_env(threads)},
        }

    @property
    def cores(self) -> int:
        """Cores of this machine that the run may use."""
        return len(os.sched_getaffinity(0))

    def _fair_threads(self, ranks: int) -> int:
        return max(1, self.cores // ranks)
