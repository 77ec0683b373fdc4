"""Ray for one run: start or join it, reserve the places, put one actor on each, and take down what was started.

Only processes that this run started are ever ended, each by its own handle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import megarl.platform
from megarl.config.layout import Layout
from megarl.errors import ClusterError, LayoutError, WorkerError
from megarl.platform import Platform
from megarl.system.hub import CachedModel
from megarl.system.own_temporary import OwnTemporary, current
from megarl.weights.placement import Placement, PlacementRequest, place
from megarl.workers import engine_actor
from megarl.workers.bundles import find_bundles
from megarl.workers.group import WorkerGroup
from megarl.workers.node_models import download_on_nodes
from megarl.workers.node_ranks import DIRECT_RANKS, NodeHandle, NodeRanksActor
from megarl.workers.own_gpu import SEES_ALL_GPUS
from megarl.workers.rank_actor import RankActor

EngineActor: Any = engine_actor.EngineActor
EngineNodeActor: Any = engine_actor.EngineNodeActor
SHUTDOWN_S = 180.0
FEWER_S = 60.0
"""For Ray to find room for all of a run that may go on with less: what an attempt before it had is given back by then."""
_TOKEN_HINT = "; one that wants a token answers only if RAY_AUTH_MODE=token is set here too"


def _is_at(address: str, joined: str) -> bool:
    """Say whether an address that Ray takes names the Ray that is `joined`, whose address is an IP with a port."""
    if "://" in address or ":" not in address:  # a client's, or 'auto'
        return True
    (host, _, port), (there, _, its) = address.rpartition(":"), joined.rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return port == its and (host == there or host.startswith("127."))


@dataclass(frozen=True)
class GroupRequest:
    """A group of training ranks to place: its name, layout and CPU threads per rank."""

    name: str
    layout: Layout
    threads: int | None


class Cluster:
    """The Ray side of a run, as a context manager: leaving it ends every actor and the Ray that it started."""

    # known once it is entered
    platform: Platform
    """That of the cluster's nodes, which need not be that of this machine."""
    placement: Placement

    def __init__(
        self,
        requests: Sequence[GroupRequest],
        *,
        engines: int,
        engine_tp: int,
        colocated: bool,
        over_nodes: bool = True,
        lent: int = 0,
        room: int = 0,
        ray_address: str | None,
        log_folder: str,
        start_deadline_s: float,
        architecture: str | None = None,
        models: Sequence[CachedModel] = (),
        fewer: Callable[[PlacementRequest, int], PlacementRequest | None] | None = None,
    ) -> None:
        """`over_nodes`: whether an engine may be on several nodes. `lent`: further engines, on GPUs of ranks. `room`: places
        that a Ray of its own has for engines that come later. `architecture`: the import path of the user's own, which every
        process of the run must know. `models`: those of the hub, which every node of a cluster must have. `fewer`: what is
        placed where there is room for so many places alone; None: all of it is, or nothing."""
        self.requests = list(requests)
        layouts = {request.name: request.layout for request in requests}
        self.asked = self.wanted = PlacementRequest(layouts, engines, engine_tp, colocated, over_nodes, lent)
        self.address = ray_address or os.environ.get("RAY_ADDRESS")
        self.log_folder = os.path.abspath(log_folder)
        self.start_deadline_s = start_deadline_s
        self.architecture, self.models, self._room, self._fewer = architecture, models, room, fewer
        self.groups: dict[str, WorkerGroup] = {}
        self.engines: list[Any] = []
        self.engine_nodes: list[Any] = []
        self.reservations: list[PlacementGroup] = []
        """Those of engines that come later; they are given back at the end."""
        self._reserved: PlacementGroup | None = None
        self._owns_ray = self._have_gpus = False
        self._temporary: OwnTemporary | None = None
        self._starter: ThreadPoolExecutor | None = None
        self._starting: Future[None] | None = None

    def begin(self) -> None:
        """Start a Ray of the run's own while this process does something else; entering the cluster waits for it.

        Where the run joins another Ray, or one is there, nothing is begun. Who begins must enter or `shutdown`.
        """
        if not self.address and not ray.is_initialized():
            self._starter = ThreadPoolExecutor(1, "ray")
            self._starting = self._starter.submit(self._join_ray)

    def __enter__(self) -> Cluster:
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            try:
                if self._starting is not None:
                    self._starting.result()
                else:
                    self._join_ray()
            finally:  # Ray ends the driver on SIGTERM, at once or, begun in a thread, after 3 s: the run stops in its own way
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, on_sigterm)
            self._place()
            if self.models and self.address:  # a Ray of its own is this machine, which has them
                download_on_nodes(self._reserved, self.placement.bundles, self.models)
        except BaseException:
            self.shutdown()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def start_groups(self, seed: int) -> Mapping[str, WorkerGroup]:
        """Start every group's ranks and bring their worlds up."""
        for name, layout in self.wanted.groups.items():
            threads = self.threads_of(name)
            actors = [
                RankActor.options(**self.where(bundle, threads)).remote(
                    self.log_folder, name, rank, layout, threads, self.architecture
                )
                for rank, bundle in enumerate(self.placement.ranks[name])
            ]
            nodes = self._nodes_of(name, actors) if len(actors) > DIRECT_RANKS else []
            self.groups[name] = WorkerGroup(name, layout, actors, self.log_folder, self.platform.name, nodes)
        for group in self.groups.values():
            group.connect(seed=seed, deadline_s=self.start_deadline_s)
        return self.groups

    def threads_of(self, group: str) -> int:
        """CPU threads of each rank of a group."""
        [asked] = [request.threads for request in self.requests if request.name == group]
        return asked or max(1, self.cores // self.placement.ranks_per_node(group))

    def _nodes_of(self, group: str, actors: Sequence[Any]) -> list[NodeHandle]:
        """An actor on each node that calls the group's ranks there."""
        nodes = []
        for ranks in self.placement.ranks_by_node(group):
            where = self.where(self.placement.ranks[group][ranks[0]], 1) | {"num_cpus": 0, "num_gpus": 0}
            actor = NodeRanksActor.options(**where).remote([actors[rank] for rank in ranks])
            nodes.append(NodeHandle(actor, ranks))
        return nodes

    def start_engines(self, path: str, model_path: str, options: Sequence[dict[str, Any]], threads: int) -> list[Any]:
        """Create one actor per entry of `options` for engines of the class at `path`; they start their engines when asked.

        An engine on several nodes has its actor on the first one and an `EngineNodeActor` on each other.
        """
        reachable = len(self.placement.machines) > 1
        for number, option in enumerate(options):
            first, *others = self.placement.engine_nodes(number) or [()]
            names = [f"engine-{number}-node-{node}-{secrets.token_hex(8)}" for node in range(1, len(others) + 1)]
            for name, bundles in zip(names, others, strict=True):
                where = self.where(bundles[0], threads)
                node_actor = EngineNodeActor.options(name=name, **where)
                self.engine_nodes.append(node_actor.remote(path, self.architecture, reachable=reachable))
            actor = EngineActor.options(**self.where(first[0] if first else None, threads))
            self.engines.append(actor.remote(path, model_path, option, self.architecture, names, reachable=reachable))
        return self.engines

    def shutdown(self) -> None:
        """End engines, ranks and, if this run started it, Ray; safe to call twice.

        If that is not done in time this process ends itself, with its stacks on stderr, and all of them with it.
        """
        if self._starting is not None:
            wait([self._starting])
        if ray.is_initialized():
            self._shutdown()
        if self._temporary is not None:
            self._temporary.remove()
        if self._starter is not None:  # not before: the kernel ends Ray's processes with the thread that started them
            self._starter.shutdown()

    def _shutdown(self) -> None:
        # with a Ray that is half gone some of these calls may not return
        faulthandler.dump_traceback_later(SHUTDOWN_S, exit=True, file=2)
        try:
            self._end_all()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end_all(self) -> None:
        engines = [engine for engine in self.engines if engine is not None]
        if engines:
            stops = [engine.stop.remote() for engine in engines]
            ray.wait(stops, num_returns=len(stops), timeout=30)
        for actor in (*engines, *self.engine_nodes):
            ray.kill(actor, no_restart=True)
        for group in self.groups.values():
            group.kill()
        self.engines, self.engine_nodes, self.groups = [], [], {}
        for reserved in filter(None, (self._reserved, *self.reservations)):
            remove_placement_group(reserved)
        self._reserved, self.reservations = None, []
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _join_ray(self) -> None:
        if ray.is_initialized():
            joined = ray.get_runtime_context().gcs_address
            if self.address and not _is_at(self.address, joined):
                raise ClusterError(
                    f"this process has joined the Ray at {joined}, and resources.ray_address (else RAY_ADDRESS) is "
                    f"'{self.address}'; call ray.shutdown() first, or leave the address out for the Ray that is joined"
                )
            return
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
            # On a CPU machine more ranks than cores may share the cores: places are counted, not cores, with room for spares.
            on_cpu = megarl.platform.detect().name == "cpu"
            places = 2 * self.wanted.bundles + self._room
            sizes: dict[str, Any] = {"num_cpus": max(self.cores, places), "num_gpus": 0} if on_cpu else {}
            # Its GCS never comes back: who has lost it need not try for a minute.
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
            # it would keep 280 MB of what actors were asked for
            os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
            os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # every actor has an environment of its own
            # a rank that is ended would take along who removes its shared memory, which would stay until the machine restarts
            os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "0")
            own = current()
            if own is None:  # in a program that is not ours to lead elsewhere
                own = self._temporary = OwnTemporary()
            sizes |= {"include_dashboard": False, "object_store_memory": 512 * 2**20, "_temp_dir": str(own.ray)}
            try:
                with own.led_there():
                    ray.init(address="local", **sizes, **quiet)
            except Exception as error:
                if "timed out" not in str(error).lower():  # Ray has no class of its own for this
                    raise
                raise WorkerError(
                    f"Ray did not come up on this machine in its time ({error}); the machine may be too busy, or have no "
                    "memory or no room in /tmp left: try again"
                ) from None
        self._owns_ray = True

    def _place(self) -> None:
        have_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.platform, self._have_gpus = megarl.platform.of_cluster(have_gpus=have_gpus), have_gpus
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if have_gpus else {})
        ends_at = time.monotonic() + self.start_deadline_s
        while not self._is_placed(bundle, left_s := max(0.0, ends_at - time.monotonic())):
            if self._fewer is None or not left_s:
                have = ray.cluster_resources()
                raise ClusterError(
                    f"the layouts need {self.asked.bundles} places with {bundle} each, but the Ray cluster has "
                    f"{have.get('CPU', 0):.0f} CPUs and {have.get('GPU', 0):.0f} GPUs; use smaller layouts or "
                    "resources.placement=colocated"
                )
            free = ray.available_resources()
            room = min(self.wanted.bundles - 1, *(int(free.get(kind, 0)) for kind in bundle))
            self.wanted = self._fewer(self.asked, room) or self.asked

    def _is_placed(self, bundle: dict[str, float], left_s: float) -> bool:
        """Reserve what is wanted, and find where everything is; what has no place, and may be less, is given back."""
        self._reserved = placement_group([bundle] * self.wanted.bundles, strategy="PACK")
        if self._reserved.wait(timeout_seconds=left_s if self._fewer is None else min(FEWER_S, left_s)):
            bundles = find_bundles(self._reserved, have_gpus=self._have_gpus, deadline_s=self.start_deadline_s)
            try:
                self.placement = place(self.wanted, bundles)
            except (ClusterError, LayoutError):  # as where an engine, or tensor parallelism, does not fit into what nodes have
                if self.wanted is self.asked:
                    raise
            else:
                return True
        if self._fewer is not None:
            remove_placement_group(self._reserved)
        return False

    def where(self, bundle: int | None, threads: int) -> dict[str, Any]:
        """Ray's options for an actor in `bundle`; with None it works elsewhere, and takes no room in the first one."""
        share = math.floor(10_000 / self.wanted.processes_per_bundle) / 10_000 if bundle is not None else 0
        return {
            "num_cpus": share,
            "num_gpus": share if self._have_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=bundle or 0),
            "runtime_env": {"env_vars": self.platform.worker_env(threads) | (SEES_ALL_GPUS if self._have_gpus else {})},
        }

    @property
    def cores(self) -> int:
        """Cores of this machine that the run may use."""
        return len(os.sched_getaffinity(0))
