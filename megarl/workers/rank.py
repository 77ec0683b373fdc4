"""One training rank: the roles that share its layout, and what the driver asks of them, through Ray or in the same process.

Runs in a process of its own. A method's exception reaches the driver as it is; nothing is swallowed here.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import ray

from megarl import platform
from megarl.config.layout import Layout
from megarl.observe.trace import Span, take_spans, timed


@timed("add_role", "forward", "update", "push_weights", "export_role", "save_role", "load_role")
class Rank:
    """Rank `rank` of a world that runs `layout`."""

    def __init__(self, name: str, rank: int, layout: Layout, threads: int) -> None:
        self.name, self.rank, self.layout = name, rank, layout
        self.platform = platform.install()
        import torch

        torch.set_num_threads(threads)
        self.roles: dict[str, Any] = {}
        self.pusher: Any = None
        self.plan: Any = None
        self.offloads: dict[str, Any] = {}
        self.quantiser: Any = None
        self.engines: set[int] = set()
        self.writer: Any = None
        self.profile: Any = None

    def address(self) -> tuple[str, int]:
        """(IP of this node, a port that was free a moment ago), for rank 0 to lead the world's rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def connect(self, address: tuple[str, int] | None, seed: int, timeout_s: float) -> int:
        """Join torch.distributed and make the layout's process groups; returns this process's id.

        `address` is where rank 0 leads the rendezvous; None: where torchrun's environment says.
        """
        import torch

        # Ray shows an actor only the device it was given, so the first one visible is its own; torchrun shows all.
        self.platform.set_device(0 if address is not None else int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group(
            self.platform.collective_backend,
            init_method=f"tcp://{address[0]}:{address[1]}" if address is not None else "env://",
            rank=self.rank,
            world_size=self.layout.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        from megarl.megatron.build import initialize_layout

        initialize_layout(self.layout, seed)
        return os.getpid()

    def add_role(self, role: str, options: Any, optimizer: Any = None) -> str | None:
        """Build `role` from `options` and load its weights; says which optimizer computes its updates."""
        from megarl.megatron.optimizer import describe_optimizer
        from megarl.megatron.roles import Role

        self.roles[role] = Role(options, optimizer)
        return describe_optimizer(optimizer) if optimizer is not None else None

    def drop_role(self, role: str) -> None:
        """Free a role that is no longer needed."""
        del self.roles[role]
        self.offloads.pop(role, None)

    def forward(self, role: str, micro_batches: list[Any], score_at: bool) -> dict[int, Any]:
        """`{response index: float32 [L, C]}`; empty where this rank does not report."""
        with _labelled(f"forward {role}"):
            return self.roles[role].forward(micro_batches, score_at=score_at)

    def update(self, role: str, micro_batches: list[Any], loss_function: Any, score_at: bool) -> dict[str, float]:
        """One optimizer step; metric sums of this rank."""
        with _labelled(f"update {role}"):
            return self.roles[role].update(micro_batches, loss_function, score_at=score_at)

    def copy_role(self, source: str, target: str) -> None:
        """Give `target` the weights of `source`, which has the same layout and head."""
        self.roles[target].copy_weights_from(self.roles[source])

    def export_role(self, role: str, folder: str) -> None:
        """Write the role as a Hugging Face folder; collective over the world."""
        from megarl.megatron.hf_export import write_role

        write_role(self.roles[role], folder)

    def open_senders(
        self, targets: Mapping[int, Any], transport: str, timeout_s: float = 300.0, engines: int | None = None
    ) -> None:
        """Connect to engines by number, or anew to those that were restarted, where this rank has weights to send them.

        Servers that take slices are sent what the reshard plan for all `engines` (None: those in `targets`) says, by every
        rank that it names. Whole tensors are sent by the leading ranks of stages: each stage's replicas share the engines
        evenly; replicas of a model with experts hold no more than a part of them each, so there it is the first one alone.
        An engine that cannot be reached is an error of the next push. `timeout_s` is as in `open_sender`.

        Raises:
            EngineError: an engine serves another model than the policy.
        """
        from megarl.models.registry import load_hf_config
        from megarl.rollout.same_model import ModelFacts, check_same_model
        from megarl.workers.weight_sync import Pusher, model_of, open_sender

        policy = self.roles["policy"].options
        trainer = ModelFacts(load_hf_config(policy.path), policy.dtype)
        self.plan = self.plan or self._plan(trainer, targets, transport, engines or len(targets))
        if self.plan is not None:
            mine = {engine: target for engine, target in targets.items() if engine in self.plan.engines}
        else:
            at, replicas = self.layout.coords(self.rank), 1 if trainer.has_experts else self.layout.dp
            mine = {engine: target for engine, target in targets.items() if engine % replicas == at.dp and not at.cp}
        self.engines |= mine.keys()
        if self.plan is None and self.layout.coords(self.rank).tp:
            return
        self.pusher = self.pusher or Pusher(f"{self.name}-{self.rank}")
        backend = self.platform.collective_backend
        for engine, target in mine.items():
            if (serves := model_of(target)) is not None:
                check_same_model(serves, trainer)
            self.pusher.connect(engine, partial(open_sender, target, transport, self.address(), backend, timeout_s))

    def _plan(self, trainer: Any, targets: Mapping[int, Any], transport: str, engines: int) -> Any:
        """This rank's part of the reshard plan; None if the engines take whole tensors."""
        from megarl.reshard.pieces import RankPlan
        from megarl.reshard.verify import verify
        from megarl.workers.weight_sync import plan_for, quantiser_for

        one = next(iter(targets.values()))
        self.quantiser = quantiser_for(one)
        plan = plan_for(one, trainer, self.layout, engines)
        if plan is not None and self.rank == 0:
            verify(plan)  # once is enough: all ranks make the same plan, this one first
        return RankPlan(plan, self.rank, at_once=transport == "process_group") if plan is not None else None

    def push_weights(
        self, role: str, bases: Mapping[int, int | None] | None = None, version: int | None = None, verify: bool = True
    ) -> dict[int, Any]:
        """Send this rank's part of the weights to engines: by engine what came of it, a `Pushed`; see `Pusher.push_loads`."""
        bases = dict.fromkeys(self.engines) if bases is None else bases
        mine = {engine: bases[engine] for engine in self.engines & bases.keys()}
        policy = self.roles[role]
        if self.plan is not None:
            from megarl.megatron.weights import local_shards

            shards = local_shards(policy.chunks, policy.options, policy.weight_map, self.quantiser)
            return self.pusher.push_loads(self.plan.loads(shards, mine), mine, version, verify)
        if not mine and not policy.weight_map.num_experts:
            return {}
        replicas = (0,) if policy.weight_map.num_experts else (self.layout.coords(self.rank).dp,)
        tensors = policy.export(self.quantiser, replicas)
        if self.pusher is not None:
            return self.pusher.push(tensors, mine, version, verify)
        for _ in tensors:  # collective: the ranks of a stage hand their shards to its leading one
            pass
        return {}

    def keep_on_device(self, what: str) -> None:
        """Have `all` roles on the device, the `policy`'s weights alone, or `none`; see `megatron.offload`."""
        from megarl.megatron.offload import Offload

        for name, role in self.roles.items():
            offload = self.offloads.setdefault(name, Offload(role))
            offload.keep(weights=what == "all" or (what, name) == ("policy", "policy"), rest=what == "all")
        self.platform.empty_cache()

    def save_role(self, role: str, folder: str) -> None:
        """Copy this rank's part of the role's checkpoint, and write it into `folder` in the background."""
        from megarl.checkpoint.background import BackgroundWriter

        self.writer = self.writer or BackgroundWriter()
        self.writer.begin(role, self.roles[role].shards(), folder)

    def saved_role(self, role: str, wait: bool) -> Any:
        """What `save_role` wrote, a `Written`, once it is on the disk; None if it is not yet and `wait` is not asked for."""
        return self.writer.result(role, wait=wait)

    def load_role(self, role: str, folder: str) -> None:
        """Read the role's distributed checkpoint; collective over the world."""
        self.roles[role].load(folder)

    def start_profile(self, file: str | None) -> None:
        """Record what is computed until `stop_profile`, for `file` (see `profiling.Profile`); None: this rank does not."""
        from megarl.workers.profiling import Profile

        self.profile = Profile(file, self.platform) if file is not None else None

    def stop_profile(self) -> None:
        """Write what was recorded."""
        if self.profile is not None:
            self.profile.write()
            self.profile = None

    def device_name(self) -> str | None:
        """What the driver calls this rank's GPU; None on a CPU."""
        return self.platform.device_name()

    def take_record(self) -> tuple[list[Span], int]:
        """What this rank did since the last call, and its peak memory in bytes."""
        return take_spans(self), self.peak_memory_bytes()

    def peak_memory_bytes(self) -> int:
        """Highest memory of this process: on a device the allocator's, on the CPU resident memory."""
        return int(self.platform.memory()["peak_bytes"])

    @ray.method(concurrency_group="control")
    def standing(self) -> tuple[int, int]:
        """Micro-batches that this rank has begun in the pass under way, and all of them; for a look while it is busy."""
        step = sys.modules.get("megarl.megatron.step")
        return (step.Standing.begun, step.Standing.wanted) if step is not None else (0, 0)

    @ray.method(concurrency_group="control")
    def dump_stacks(self, folder: str) -> str:
        """Write this process's Python stacks beside the run's files, while another method is stuck; returns the file."""
        path = os.path.join(folder, f"{self.name}-{self.rank}.txt")
        with open(path, "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return path


def _labelled(what: str) -> Any:
    """A context that a profile shows under this name."""
    from torch.profiler import record_function

    return record_function(what)
