"""A rank's random numbers in a checkpoint: every generator that torch, megatron-core, NumPy or Python draws from.

Under the layout that it was saved in, a checkpoint gives each rank its own generators back, bit for bit. Under another layout
there is no rank to give them to: all generators are then seeded from the checkpoint's seed and the updates done.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megarl import platform


def sharded_rng_state() -> ShardedObject:
    """This rank's generators for megatron-core's dist_checkpointing; when loading, the place to load them into."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng", state, (world_size,), (rank,), replica_id=0)


def restore_rng_state(state: dict[str, Any]) -> None:
    """Put back what `sharded_rng_state` saved."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def initial_seed() -> int:
    """The seed that this rank's device generator started from: that of the run, the same on every rank."""
    generators: Any = torch.cuda.default_generators
    return int(generators[torch.cuda.current_device()].initial_seed())


def reseed(seed: int, updates: int) -> None:
    """Seed every generator by what `seed` and `updates` determine alone."""
    derived = random.Random(f"{seed} after {updates} updates").getrandbits(31)
    platform.current().seed(derived)
    tensor_parallel.model_parallel_cuda_manual_seed(derived)
