"""One training rank: the roles that share its layout, and its answers to what the driver asks (`rank_calls.py`).

Runs in a process of its own, in which `platform.install()` came before this module was imported.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import ray
import torch
from torch.profiler import record_function

from megarl.algorithms import WHOLE
from megarl.checkpoint.background import BackgroundWriter
from megarl.checkpoint.dist_writer import Written
from megarl.config.layout import Layout
from megarl.data.answers import Answers
from megarl.data.batch import Batch, laid_rows
from megarl.data.shares import Share
from megarl.data.stored import RowSample
from megarl.data.stored_shares import Computed, RowWork, StoredShare
from megarl.data.stream import ScorePosition, TopK
from megarl.megatron.build import initialize_layout
from megarl.megatron.hf_export import write_role
from megarl.megatron.offload import Offload
from megarl.megatron.optimizer import describe_optimizer
from megarl.megatron.options import ModelOptions, OptimizerOptions
from megarl.megatron.rank_model import RankModel
from megarl.megatron.row_shard import shard_of_replica
from megarl.megatron.weights import Quantiser, local_shards
from megarl.models.adapters import adapter_part
from megarl.models.registry import load_hf_config
from megarl.observe.rank_record import RankRecord
from megarl.observe.trace import take_spans, timed
from megarl.option_list import part
from megarl.platform.base import Platform
from megarl.platform.shared_memory import share
from megarl.runs.update_metrics import LOG_PROBS, LogProbs
from megarl.weights.machines import Machines
from megarl.weights.model_compatibility import ServedModel, check_same_model
from megarl.weights.plan import LOAD_BYTES
from megarl.weights.pusher import Pushed, Pusher, PushSummary
from megarl.weights.rank_plan import SliceKey
from megarl.workers import senders
from megarl.workers.planned_part import PlannedPart
from megarl.workers.profiling import Profile


def free_address() -> tuple[str, int]:
    """(IP of this node, a port that was free a moment ago), for one side of a rendezvous."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


@timed(
    "add_role", "forward", "update", "optimizer_step", "open_senders", "push_weights", "keep_on_device",
    "export_role", "save_role", "load_role",
)  # fmt: skip
class Rank:
    """Rank `rank` of a world that runs `layout`. The driver calls its methods by name (`RankCalls`).

    An exception reaches the driver as it is raised.
    """

    def __init__(self, name: str, rank: int, layout: Layout, threads: int, platform: Platform, gpu: int = 0) -> None:
        """`gpu`: the number of its GPU among those that this process sees."""
        self.name, self.rank, self.layout, self.platform, self.gpu = name, rank, layout, platform, gpu
        torch.set_num_threads(threads)
        self.load_bytes = LOAD_BYTES[platform.name]
        self.roles: dict[str, RankModel] = {}
        self.beginnings: dict[str, ModelOptions] = {}
        self.pusher: Pusher | None = None
        self.parts: list[PlannedPart] = []  # of the policy; the last is what is sent
        self.offloads: dict[str, Offload] = {}
        self.quantiser: Quantiser | None = None
        self.sends_in_place = False
        self.engines: set[int] = set()
        self.pushed: dict[int, Pushed] = {}  # by the last update
        self.writer: BackgroundWriter | None = None
        self.profile: Profile | None = None

    def connect(self, address: tuple[str, int] | None, seed: int, timeout_s: float) -> int:
        """Join torch.distributed and make the layout's process groups; returns this process's id.

        `address` is where rank 0 leads the rendezvous; None: where torchrun's environment says.
        """
        self.platform.set_device(self.gpu)  # of this thread, in which Ray calls everything that computes
        self._stay_near_the_gpu()
        torch.distributed.init_process_group(
            self.platform.collective_backend,
            init_method=f"tcp://{address[0]}:{address[1]}" if address is not None else "env://",
            rank=self.rank,
            world_size=self.layout.world_size,
            timeout=timedelta(seconds=max(timeout_s, self.platform.collective_timeout_s)),
        )
        initialize_layout(self.layout, seed)
        return os.getpid()

    def _stay_near_the_gpu(self) -> None:
        """Else what is moved between the GPU and main memory may pass through another processor."""
        cores = self.platform.bind_to_device(self.gpu)
        if cores:
            torch.set_num_threads(min(torch.get_num_threads(), len(cores)))
            stated = f"{len(cores)} cores of its GPU's NUMA node, with {torch.get_num_threads()} threads"
            sys.stderr.write(f"rank {self.rank} of {self.name} is bound to the {stated}\n")  # which is its log

    def add_role(self, role: str, options: ModelOptions, optimizer: OptimizerOptions | None) -> str | None:
        """Build `role` from `options` and load its weights; says which optimizer computes its updates."""
        if options.begins is not None:
            self.beginnings[role] = options
            return None
        self.roles[role] = RankModel(options, optimizer)
        return describe_optimizer(optimizer) if optimizer is not None else None

    def forward(self, role: str, shares: Sequence[Share], position: ScorePosition, top_k: TopK | None = None) -> Answers | None:
        """`{response index: float32 [L, C]}` for the micro-batches of all `shares` (see `step.forward`); None where this rank
        does not report."""
        with record_function(f"forward {role}"):  # a profile shows it under this name
            begun = self.beginnings.get(role)
            model = self.roles[role if begun is None or begun.begins is None else begun.begins]
            with nullcontext() if begun is None else adapter_part("layers").role_as_begun(model, begun):
                return model.forward([*chain(*shares)], position=position, top_k=top_k) or None

    def whole_shares(self, shares: Sequence[Share], *values: Any) -> list[Share]:
        """The `shares` with their tokens; `values` are the objects of those that are stored, one share behind the other."""
        left = iter(values)
        return [
            share.whole([*islice(left, len(share.objects))]) if isinstance(share, StoredShare) else share for share in shares
        ]

    def forward_stored(
        self, role: str, shares: Sequence[Share], position: ScorePosition, top_k: TopK | None = None
    ) -> tuple[None, Answers | None]:
        """`forward` with the answers apart: the second value."""
        return None, self.forward(role, shares, position, top_k)

    def compute(
        self,
        shared: tuple[RowWork, Any],
        shares: Sequence[Share],
        samples: Sequence[RowSample],
        arguments: Sequence[Any],
        alone: bool,
    ) -> tuple[Computed, Answers]:
        """Do work on the rows of a share, `alone` or while the other replicas do it on theirs; `shared` are the function and
        the arguments that all get.

        The second value has the columns that it set, and the mask if it changed it.
        """
        [share], (work, *common) = shares, shared
        batch = Batch.of_share(samples, share)
        here = torch.device("cpu") if alone else torch.device(self.platform.device(self.gpu))
        shard = WHOLE if alone else shard_of_replica(torch.tensor(share.rows), here)
        before, mask = dict(batch.columns), batch.mask.clone()
        answer = work(batch, shard, *common, *arguments)
        names = [name for name, column in batch.columns.items() if column is not before.get(name)]
        is_changed = torch.tensor([int(not torch.equal(batch.mask, mask))])
        changed = bool(shard.total(is_changed))
        columns = [batch.columns[name] for name in names] + ([batch.mask.float()] if changed else [])
        rows, lengths = [*range(len(batch))], share.lengths.tolist()
        laid = [laid_rows(column.float(), rows, lengths) for column in columns]
        values = np.stack(laid) if laid else np.zeros((0, sum(lengths)), np.float32)
        return Computed(answer, names, batch.counts.numpy() if changed else None), Answers(share.rows, share.lengths, values)

    def update_stored(
        self, role: str, shares: Sequence[Share], loss_function: Any, position: ScorePosition, applies: bool = True
    ) -> tuple[dict[str, float], Answers]:
        """`update` with the log-probs that it shows apart: the second value."""
        metrics: dict[str, Any] = self.update(role, shares, loss_function, position, applies)
        shown: LogProbs = metrics.pop(LOG_PROBS, {})
        lengths = np.array([len(values) for values in shown.values()], np.int64)
        values = np.concatenate([np.zeros(0, np.float32), *shown.values()], dtype=np.float32)
        return metrics, Answers(np.array([*shown], np.int64), lengths, values[None])

    def ask(self, role: str, question: Callable[[Any], Any]) -> Any:
        """Answer an option's `question` about the role's model (`RankModel`) on this rank; collective if the question is."""
        return question(self.roles[role])

    def update(
        self, role: str, shares: Sequence[Share], loss_function: Any, position: ScorePosition, applies: bool = True
    ) -> dict[str, float]:
        """One optimizer step on the micro-batches of all `shares`, or gradients for one; metric sums of this rank."""
        with record_function(f"update {role}"):
            micro_batches = [*chain(*shares)]
            if applies:
                return self.roles[role].update(micro_batches, loss_function, position=position)
            from megarl.megatron.gathered_updates import gather

            return gather(self.roles[role], micro_batches, loss_function, position)

    def optimizer_step(self, role: str) -> dict[str, float]:
        """One optimizer step by gradients of updates that did not apply; `grad_norm`, `lr` and `skipped`, on rank 0."""
        from megarl.megatron.gathered_updates import apply_gathered

        return apply_gathered(self.roles[role])

    def copy_role(self, source: str, target: str, share: float) -> None:
        """`target` ← share·`source` + (1 − share)·`target`; both have the same layout and head. 1: copy."""
        self.roles[target].copy_weights_from(self.roles[source], share)

    def export_role(self, role: str, folder: str, adapters: bool) -> None:
        """Write the role as a Hugging Face folder, or its adapters as a PEFT folder; collective over the world."""
        write_role(self.roles[role], folder, adapters=adapters)

    def open_senders(
        self,
        targets: Mapping[int, Any],
        transport: str,
        timeout_s: float = 300.0,
        engines: int | None = None,
        connection: int = 0,
        machines: Machines | None = None,
    ) -> None:
        """Connect to engines by number, or anew to those that were restarted, where this rank has weights to send them.

        Servers that take slices are sent what the reshard plan for all `engines` (None: those in `targets`) says, by every
        rank that it names. Whole tensors are sent by the leading ranks of stages: each stage's replicas share the engines
        evenly; replicas of a model with experts hold no more than a part of them each, so there it is the first one alone.
        An engine that cannot be reached is an error of the next push. `timeout_s` is as in `senders.open_sender`,
        `connection` as in `senders.Membership`. With `machines` what an engine's rank elsewhere is to open goes by its relay.

        Raises:
            EngineError: an engine serves another model than the policy.
        """
        policy = self.roles["policy"].options
        lora = policy.lora if policy.sends_adapters else None
        trainer = ServedModel(load_hf_config(policy.path), policy.dtype, predicts=policy.syncs_prediction, lora=lora)
        self.sends_in_place = transport == "process_group"
        if not self.parts:
            relayed = machines if transport == "shared_memory" else None  # the others reach any machine
            self._make_plans(trainer, targets, engines or len(targets), relayed)
        if self.parts:
            own_targets = {engine: target for engine, target in targets.items() if engine in self.parts[-1].engines}
        else:
            at, replicas = self.layout.coords(self.rank), 1 if trainer.has_experts else self.layout.dp
            own_targets = {engine: target for engine, target in targets.items() if engine % replicas == at.dp and not at.cp}
        self.engines |= own_targets.keys()
        if not self.parts and self.layout.coords(self.rank).tp:
            return
        if transport == "shared_memory":
            parameters = chain.from_iterable(chunk.parameters() for chunk in self.roles["policy"].chunks)
            share(parameter for parameter in parameters if parameter.requires_grad)
        choose_device = partial(self.platform.set_device, self.gpu)
        self.pusher = self.pusher or Pusher(f"{self.name}-{self.rank}", choose_device, self.load_bytes)
        for engine, target in own_targets.items():
            if (serves := senders.model_of(target)) is not None:
                check_same_model(serves, trainer)
            member = self._membership(engine, connection)
            self.pusher.connect(engine, partial(senders.open_sender, target, transport, member, timeout_s))

    def _membership(self, engine: int, connection: int) -> senders.Membership:
        """The place of this rank among an engine's senders."""
        all_senders = self.parts[-1].senders(engine) if self.parts else [self.rank]
        backend, device = self.platform.collective_backend, self.platform.device(self.gpu)
        return senders.Membership(connection, all_senders.index(self.rank), len(all_senders), backend, device)

    def _make_plans(self, trainer: ServedModel, targets: Mapping[int, Any], engines: int, machines: Machines | None) -> None:
        """Make this rank's share of the reshard plans; none if the engines take whole tensors."""
        target = next(iter(targets.values()))
        self.quantiser = senders.quantiser_for(target)
        device = self.platform.device(self.gpu)
        plans = senders.plans_for(target, trainer, self.layout, engines, self.load_bytes)
        for plan in plans:
            if machines is not None and plan is plans[-1]:  # of the others nothing is sent
                relayed = part("transports", "relay", "rollout.weight_transport").RelayedPart
                self.parts.append(relayed(plan, self.rank, machines, device))
            else:
                self.parts.append(PlannedPart(plan, self.rank, single_batch=self.sends_in_place))

    def update_engines(
        self, role: str, bases: Mapping[int, int | None] | None = None, version: int | None = None, verify: bool = True
    ) -> PushSummary:
        """Send this rank's part of the weights to engines; see `push_weights`. `sent_checksums` tells the rest of what came of
        it."""
        self.pushed = self.push_weights(role, bases, version, verify)
        return PushSummary.of(self.pushed)

    def sent_checksums(self, asked: Mapping[int, Collection[int]]) -> dict[int, dict[SliceKey, str]]:
        """By engine the checksums of what the last update sent to those of its ranks that are asked for, box by box."""
        return {
            engine: {box: checksum for box, checksum in self.pushed[engine].checksums.items() if box.engine_rank in ranks}
            for engine, ranks in asked.items()
            if engine in self.pushed
        }

    def push_weights(
        self, role: str, bases: Mapping[int, int | None] | None = None, version: int | None = None, verify: bool = True
    ) -> dict[int, Pushed]:
        """Send this rank's part of the weights to engines: by engine what came of it; see `Pusher.push_loads`."""
        bases = dict.fromkeys(self.engines) if bases is None else bases
        own_bases = {engine: bases[engine] for engine in self.engines & bases.keys()}
        policy = self.roles[role]
        if self.parts and policy.options.sends_adapters:
            return adapter_part("push").push_adapters(self, policy, bases, verify=verify)
        if self.parts:
            assert self.pusher is not None, "who has a plan has opened senders"
            at_once = self.sends_in_place  # else a few at a time are copied into buffers
            shards = local_shards(policy.chunks, policy.options, policy.weight_map, self.quantiser, at_once=at_once)
            return self.parts[0].push(self.pusher, shards, own_bases, bases, version, verify=verify)
        if not own_bases and not policy.weight_map.num_experts:
            return {}
        replicas = (0,) if policy.weight_map.num_experts else (self.layout.coords(self.rank).dp,)
        if policy.options.sends_adapters:  # such an engine has the weights of the model's folder, and keeps them
            tensors = policy.export_adapters(replicas)
        else:
            tensors = policy.export(self.quantiser, replicas, prediction=policy.options.syncs_prediction)
        if self.pusher is not None:
            return self.pusher.push(tensors, own_bases, version, verify=verify)
        for _ in tensors:  # collective: the ranks of a stage hand their shards to its leading one
            pass
        return {}

    def keep_on_device(self, what: str) -> None:
        """Have `all` roles on the device, the `policy`'s weights alone, or `none`; see `megatron.offload`."""
        for name, role in self.roles.items():
            offload = self.offloads.setdefault(name, Offload(role))
            offload.keep(weights=what == "all" or (what, name) == ("policy", "policy"), rest=what == "all")
        self.platform.empty_cache()

    def save_role(self, role: str, folder: str) -> None:
        """Copy this rank's part of the role's checkpoint, and write it into `folder` in the background."""
        from megarl.megatron.role_checkpoint import shards_of_role  # a step needs none of it

        self.writer = self.writer or BackgroundWriter()
        self.writer.begin(role, shards_of_role(self.roles[role]), folder)

    def saved_role(self, role: str, wait: bool) -> Written | None:
        """The files that `save_role` wrote once it is on the disk; None if it is not yet and `wait` is not asked for."""
        assert self.writer is not None, "save_role comes before"
        return self.writer.result(role, wait=wait)

    def load_role(self, role: str, folder: str) -> None:
        """Read the role's distributed checkpoint; collective over the world."""
        from megarl.megatron.role_checkpoint import load_role

        load_role(self.roles[role], folder)

    def start_profile(self, file: str | None) -> None:
        """Record what is computed until `stop_profile`, for `file` (see `profiling.Profile`); None: this rank does not."""
        self.profile = Profile(file, self.platform) if file is not None else None

    def stop_profile(self) -> None:
        """Write what was recorded."""
        if self.profile is not None:
            self.profile.write()
            self.profile = None

    def device_name(self) -> str | None:
        """The driver's name for this rank's GPU; None on a CPU."""
        return self.platform.device_name()

    def take_record(self) -> RankRecord:
        """The record of what this rank did since the last call."""
        tower_s = self.roles["policy"].take_tower_seconds() if "policy" in self.roles else 0.0
        # on a device the allocator's peak, on the CPU that of resident memory
        return RankRecord(take_spans(self), int(self.platform.memory()["peak_bytes"]), tower_s)

    def progress(self) -> tuple[int, int]:
        """Micro-batches begun in the pass under way, and all of them (0: no pass); for another thread to ask."""
        under_way = [role.progress for role in tuple(self.roles.values()) if role.progress.wanted]
        return (under_way[0].begun, under_way[0].wanted) if under_way else (0, 0)
