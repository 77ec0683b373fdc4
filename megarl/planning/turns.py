"""The turns of trainer and engines on a GPU that they share: everything at once, or in turns, the fullest of which must fit.

Where they take turns (workers/gpu_sharing.py), engines sleep while the trainer works. While they are given weights the
trainer keeps the policy's weights alone, and engines have theirs alone, without a KV cache; while they generate, the trainer
has nothing but its processes: `RESIDENT` says so for plans and runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from megarl.config import AnyConfig
from megarl.config.engine_kinds import capabilities_of
from megarl.planning.gpus import PROCESS_BYTES, GpuSpec

ALL_AT_ONCE = "all at once"
TRAINING, UPDATING, GENERATING = "training", "updating", "generating"
STATED = {
    ALL_AT_ONCE: "",
    TRAINING: " while the trainer works",
    UPDATING: " while the engines are given weights",
    GENERATING: " while the engines generate",
}
"""A turn as the end of a sentence."""
Kept = Literal["all", "policy", "none"]
"""Parts of the trainer on the device: everything, the policy's weights alone, or nothing."""
OfEngine = Literal["all", "weights", "none"]
"""Parts of an engine on the device: everything, weights alone, or what a sleeping one keeps."""


class Resident(NamedTuple):
    """Things on a GPU in a turn: parts of the trainer and of engines, and whether weights are sent to these."""

    trainer: Kept
    engine: OfEngine
    sends: bool


RESIDENT: Mapping[str, Resident] = {
    ALL_AT_ONCE: Resident("all", "all", sends=True),
    TRAINING: Resident("all", "none", sends=False),
    UPDATING: Resident("policy", "weights", sends=True),
    GENERATING: Resident("none", "all", sends=False),
}
"""The one list that plans count by and that runs keep to (`workers/gpu_sharing.py`). `all` is every role of the config
(`config.roles`), which are those that a run loads (`workers/roles.py`: `role_specs`)."""
ASLEEP_BYTES = 1.9e9
"""Bytes that a sleeping server keeps of a GPU, its context included: measured on an H100 (docs/gpu.md)."""
RESERVE_BYTES = 10 * 2**30
"""Bytes left to a server beside weights, KV cache and trainer (rollout/engines/sglang/server.py: `WORKING_BYTES`)."""


def takes_turns(config: AnyConfig, platform: str) -> bool:
    """Return whether trainer and engines share GPUs and never work at the same time."""
    rollout = config.sampling
    return (
        platform == "cuda"
        and rollout is not None
        and config.resources.placement == "colocated"
        and capabilities_of(rollout).sleeps
        and rollout.schedule.mode == "sync"
        and rollout.weight_transport == "shared_memory"
        and rollout.engine_args.get("enable_memory_saver") is not False
    )


def lends(config: AnyConfig, platform: str) -> bool:
    """Return whether engines take turns with the trainer on GPUs that it lends them, where all others have their own."""
    return platform == "cuda" and config.sampling is not None and config.sampling.lent_engines > 0


def bytes_beside_engines(config: AnyConfig) -> int:
    """Count what the trainer's processes keep on a GPU while engines that take turns with it generate."""
    return int(len(config.layouts) * PROCESS_BYTES)


def static_bytes(config: AnyConfig, gpu: GpuSpec) -> float:
    """What weights and KV cache of an engine that takes turns with the trainer have of a GPU, if the config does not say."""
    return gpu.memory_gb * 1e9 - bytes_beside_engines(config) - RESERVE_BYTES


def reserve_bytes(gpu: GpuSpec) -> float:
    """What is left of a server's reserve for its own work.

    Its process and what allocators hold unused are in the plan already.
    """
    return max(0.0, RESERVE_BYTES - PROCESS_BYTES - (gpu.memory_gb * 1e9 - gpu.usable_bytes))
