"""A Ray of several nodes on this machine that say they have GPUs: for rehearsals, where every process works on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 2 * 10**8


@contextmanager
def advertised_cluster(gpus: Sequence[int]) -> Iterator[str]:
    """The address of a Ray with a node for every entry of `gpus`, which has so many; it is gone when the context is left."""
    before = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    store = {"object_store_memory": OBJECT_STORE_BYTES}
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, **store})
    try:
        for count in gpus:
            started.add_node(num_cpus=count, num_gpus=count, **store)
        yield started.address
    finally:
        if ray.is_initialized():
            ray.shutdown()
        started.shutdown()
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
