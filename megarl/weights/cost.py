"""The cost of a plan on a described cluster: bytes by link and GPU, seconds, and what bounds them.

The link between two ranks is where their GPUs are: the same GPU (an engine in the trainer's place), the same node (NVLink), or
two nodes (InfiniBand). All links work at the same time and in both directions, each GPU's share of each at the stated rate.
`Cost.seconds` is the slowest of these shares. What waiting for one another adds depends on the way that weights take
(`WAITING`); `planning/times.py` adds that, and what an update takes beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from megarl.config.yaml_tree import read_yaml
from megarl.errors import ClusterError, ConfigError, LayoutError, describe_value, nearest
from megarl.weights.placement import Placement, PlacementRequest, place, planned_bundles
from megarl.weights.plan import RANKS_PER_LOAD, ReshardPlan
from megarl.weights.sglang_targets import EVERY_RANK
from megarl.weights.tensors import Ints

LINKS = ("same GPU", "NVLink", "InfiniBand")
STAGED_LOADS = 2
"""One is filled while the other is read."""
MESSAGE_S = 1e-4
"""Seconds of a message of process groups or relays beside its bytes: a launch, and to meet the other side. An assumption."""
LOAD_S = 1e-3
"""Seconds of a load beside its bytes, from when it is staged until an engine's rank reads it. An assumption."""
WAITING = {"shared_memory": 1.25, "relays": 1.09, "process_group": 1.2, "rdma": 1.05}
"""By the way that weights take, the seconds of an update's messages over those that the busiest link needs: what they wait for
one another. A test holds them to what the ready plans take in a simulated network (tests/weights/test_update_play.py).
"""
_BATCH = 2**20


@dataclass(frozen=True)
class ClusterRates:
    """GPUs and their links, in GB (10^9 bytes) per second, of one GPU in one direction. The defaults are nodes of 8 H100.

    `copy_gb_per_s` is of copies on a GPU: packing a bucket, and what an engine on the same GPU takes over. Where
    `host_gb_per_s` is given, what goes to another GPU passes main memory on both sides at this rate; None: GPUs reach each
    other directly.
    """

    gpus_per_node: int = 8
    copy_gb_per_s: float = 1500.0
    nvlink_gb_per_s: float = 450.0
    ib_gb_per_s: float = 50.0
    host_gb_per_s: float | None = None

    @classmethod
    def read(cls, path: str | Path) -> ClusterRates:
        """The cluster that a YAML file describes; what it leaves out is as the defaults.

        Raises:
            ConfigError: the file cannot be read, a field is unknown, or a value is no positive number.
        """
        tree, known = read_yaml(path), [field.name for field in fields(cls)]
        for name, value in tree.items():
            if name not in known:
                raise ConfigError(
                    f"{path}: {name} is not a field of a cluster{nearest(str(name), known)}; it has {', '.join(known)}"
                )
            allowed_types = int if name == "gpus_per_node" else (int, float)
            if value is None and name == "host_gb_per_s":
                continue
            if isinstance(value, bool) or not isinstance(value, allowed_types) or not 0 < value < float("inf"):
                kind = "whole number" if name == "gpus_per_node" else "number"
                raise ConfigError(f"{path}: {name} is {describe_value(value)}; it must be a {kind} above 0")
        return cls(**tree)


@dataclass(frozen=True)
class LinkCost:
    """Bytes over one kind of link, of all GPUs and of the busiest in either direction, and the seconds these take there."""

    name: str
    nbytes: int
    busiest_out: int
    busiest_in: int
    gb_per_s: float
    where: str

    @property
    def seconds(self) -> float:
        """Seconds of the busiest GPU, directions at the same time."""
        return max(self.busiest_out, self.busiest_in) / 1e9 / self.gb_per_s


@dataclass(frozen=True)
class Cost:
    """The cost of an update. `redundancy`: bytes received over bytes held; `sent`, `received`: (least, most) of a rank."""

    links: tuple[LinkCost, ...]
    redundancy: float
    peak_staging_bytes: int
    sent: tuple[int, int]
    received: tuple[int, int]

    @property
    def bound(self) -> LinkCost:
        """The part that takes longest."""
        return max(self.links, key=lambda link: link.seconds)

    @property
    def seconds(self) -> float:
        """Time of the busiest link: no update of all engines is faster."""
        return self.bound.seconds


def placement_of(request: PlacementRequest, cluster: ClusterRates) -> Placement | None:
    """Place ranks and engines of a run on nodes of a cluster; None: they do not fit into such nodes."""
    try:
        return place(request, planned_bundles(request.bundles, cluster.gpus_per_node))
    except (LayoutError, ClusterError):
        return None


def cost_of(plan: ReshardPlan, cluster: ClusterRates, *, colocated: bool, placement: Placement | None = None) -> Cost:
    """The cost of an update where the ranks of `placement` and its engines are.

    Without one, GPU i is training rank i's, and the engines' ranks follow each other on the same GPUs (`colocated`; from the
    first on again, should there be more of them) or on nodes of their own.
    """
    world, ranks, engines = plan.layout.world_size, plan.target.ranks, plan.target.engines
    if placement is not None:
        of_rank, of_engine = np.array(placement.ranks["policy"]), np.array(placement.engines)
        nodes = {node: number for number, node in enumerate(placement.nodes)}
        node_of = np.array([nodes[bundle.node] for bundle in placement.bundles])
    else:
        first = 0 if colocated else -(-world // cluster.gpus_per_node) * cluster.gpus_per_node
        modulus = world if colocated else first + engines * ranks
        of_rank, of_engine = np.arange(world), (first + np.arange(engines * ranks).reshape(engines, ranks)) % modulus
        node_of = np.arange(max(modulus, world)) // cluster.gpus_per_node
    gpus = len(node_of)
    out, into = np.zeros((2, len(LINKS), gpus), np.int64)  # bytes of every GPU, `[link, gpu]`
    for sender, engine, engine_rank, nbytes in _links(plan):
        source, target = of_rank[sender], of_engine[engine, engine_rank]
        same_node = node_of[source] == node_of[target]
        link = np.where(source == target, 0, np.where(same_node, 1, 2))
        out += _summed(link * gpus + source, nbytes, out.size).reshape(out.shape)
        into += _summed(link * gpus + target, nbytes, into.size).reshape(into.shape)
    packed = np.zeros(gpus, np.int64)
    packed[of_rank] = _packed(plan, world)
    rates = (cluster.copy_gb_per_s, cluster.nvlink_gb_per_s, cluster.ib_gb_per_s)
    links = [_link(name, out[i], into[i], rate) for i, (name, rate) in enumerate(zip(LINKS, rates, strict=True))]
    links.append(_link("packing", packed, np.zeros_like(packed), cluster.copy_gb_per_s))
    if cluster.host_gb_per_s is not None:
        links.append(_link("main memory", out[1] + out[2], into[1] + into[2], cluster.host_gb_per_s))
    of_ranks = out.sum(axis=0)[of_rank]
    received = plan.received_bytes
    return Cost(
        links=tuple(links),
        redundancy=float(received.sum() / plan.own_bytes),
        peak_staging_bytes=STAGED_LOADS * min(ranks, RANKS_PER_LOAD) * int(plan.bucket_nbytes.max()),
        sent=(int(of_ranks.min()), int(of_ranks.max())),
        received=(int(received.min()), int(received.max())),
    )


def _links(plan: ReshardPlan) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
    """(training rank, engine, rank of the engine, bytes) of every bucket for every rank, some engines at a time."""
    engine_rank = plan.bucket_engine_rank
    copies = np.where(engine_rank == EVERY_RANK, plan.target.ranks, 1)
    bucket = np.repeat(np.arange(len(copies)), copies)
    nth = np.arange(len(bucket)) - np.repeat(np.cumsum(copies) - copies, copies)
    engine_rank = np.where(engine_rank == EVERY_RANK, 0, engine_rank)[bucket] + nth
    nbytes = plan.bucket_nbytes[bucket]
    for engines in np.array_split(np.arange(plan.target.engines), -(-plan.target.engines * len(bucket) // _BATCH)):
        engine, several = np.repeat(engines, len(bucket)), len(engines)
        sender = plan.sender(engine, np.tile(bucket, several))
        yield sender, engine, np.tile(engine_rank, several), np.tile(nbytes, several)


def _packed(plan: ReshardPlan, gpus: int) -> Ints:
    """Bytes that each rank packs into buckets: one packing serves all the engines that it sends the bucket to."""
    sources = plan.bucket_source
    buckets = np.arange(len(sources))
    sends = np.zeros((len(sources), int(plan.sources.replicas.max())), np.bool_)
    for engine in range(plan.target.engines):
        sends[buckets, plan.replica(np.array(engine), buckets)] = True
    bucket, replica = np.nonzero(sends)
    return _summed(plan.sources.rank(sources[bucket], replica), plan.bucket_nbytes[bucket], gpus)


def _summed(index: Ints, nbytes: Ints, length: int) -> Ints:
    """Bytes by index; exact, as float64 holds every whole number of bytes below 9 PB."""
    return np.bincount(index, weights=nbytes, minlength=length).astype(np.int64)


def _link(name: str, out: Ints, into: Ints, rate: float) -> LinkCost:
    sends = out.max() >= into.max()
    where = f"out of GPU {np.argmax(out)}" if sends else f"into GPU {np.argmax(into)}"
    return LinkCost(name, int(out.sum()), int(out.max()), int(into.max()), rate, where)
