"""The training side of a run as the driver sees it: which role lives in which group of ranks, and calls to them.

Data-parallel ranks get their share once, through Ray's object store; all ranks of a replica read the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor

from megarl.algorithms import WHOLE
from megarl.checkpoint.dist_writer import Written, join_roles
from megarl.checkpoint.format.safe_pickle import check_pickles
from megarl.config import AnyConfig
from megarl.config.fp8 import token_multiple
from megarl.config.guard_rules import skip_rules
from megarl.config.megatron_options import megatron_of
from megarl.config.rollout import RolloutConfig
from megarl.config.section import TEMPLATE_FILE
from megarl.data.answers import Answers
from megarl.data.batch import Batch
from megarl.data.micro_batches import plan_micro_batches
from megarl.data.shares import Share
from megarl.data.stored import Stored
from megarl.data.stored_batch import StoredBatch
from megarl.data.stored_shares import RowTask
from megarl.data.stream import ScorePosition, TopK
from megarl.megatron.options import (
    ExpertBalance,
    ModelOptions,
    OptimizerOptions,
    ParameterGroup,
    SamplingLimits,
    untested_pair,
)
from megarl.models.flops import FlopsModel
from megarl.models.update_flops import PASSES, update_flops
from megarl.observe.rank_record import RankRecord, UpdateFlops
from megarl.option_list import functions, parts
from megarl.planning.gpus import gpu_called
from megarl.runs.training_side import CRITIC, POLICY, REFERENCE, Answer, JoinFiles
from megarl.runs.update_metrics import combine
from megarl.weights.machines import Machines
from megarl.weights.pusher import UpdateSummary
from megarl.weights.rank_plan import SliceKey
from megarl.workers.cluster import GroupRequest
from megarl.workers.group import RankGroup, StoringGroup
from megarl.workers.rank_calls import RankCalls
from megarl.workers.role_specs import RoleSpec, shares_prefixes
from megarl.workers.row_work import compute_on_ranks


def group_requests(config: AnyConfig) -> list[GroupRequest]:
    """The groups of ranks that `config` needs; a reference without a layout of its own lives in the policy's."""
    return [
        GroupRequest(role.name, role.layout, role.trained.threads_per_rank if role.trained is not None else None)
        for role in config.roles
        if role.layout is not None
    ]


class Roles:
    """The models of a run behind `forward` and `update`, whatever ranks they live on."""

    def __init__(
        self,
        config: AnyConfig,
        specs: Mapping[str, RoleSpec],
        groups: Mapping[str, RankGroup],
        layer_spec: str,
        flops: FlopsModel,
        *,
        sampling: RolloutConfig | None,
        updates: int,
    ) -> None:
        """`sampling` is how responses are sampled (None: they are given): its temperature divides the logits of every log-prob,
        and its limits are the policy's. `updates` is how many optimizer steps the run will make."""
        self.config, self.specs, self.groups, self.layer_spec, self.flops = config, specs, groups, layer_spec, flops
        self.temperature, self.updates = (1.0 if sampling is None else sampling.temperature), updates
        limits = {} if sampling is None else sampling.sampling_limits
        self.sampling_limits = SamplingLimits(**limits) if limits else None
        self.share_prefix = shares_prefixes(config, layer_spec, flops)
        self.optimizer: str | None = None
        self.peak_flops: float | None = None
        """Peak of a GPU of the policy, in operations per second; None where it is not known."""
        self.device: str | None = None
        """Name of the policy's GPUs, once it is loaded."""
        self.before_use: Callable[[], None] = lambda: None
        """Called before the roles compute, are saved or exported: whoever shares the device with them gives way."""
        self._connections = 0
        # A step's passes over all rows ask for the same plan.
        self._plan = lru_cache(maxsize=4)(plan_micro_batches)
        self.loaded: list[str] = []
        """Roles that have been loaded, in their order."""
        self._saving: list[str] = []
        self._update_flops = UpdateFlops()

    def load(self, role: str) -> None:
        """Build `role` on its ranks and load its weights."""
        self.before_use()
        config, group, spec = self.config, self.group_of(role), self.specs[role]
        sizes = spec.trained or config.policy
        options = ModelOptions(
            spec.path,
            group.layout,
            head=spec.head,
            layer_spec=self.layer_spec,
            core_attention=self._core_attention(role),
            dtype=config.model.dtype,
            recompute=config.model.recompute,
            temperature=self.temperature,
            sampling_limits=self.sampling_limits if role == POLICY else None,
            logit_chunk_tokens=sizes.logit_chunk_tokens,
            trainable=spec.trained is not None,
            token_multiple=token_multiple(config.model.fp8, config.model.fp8_recipe),
            padded_tokens=sizes.max_tokens_per_micro_batch if sizes.static_shapes else None,
            fp8=config.model.fp8,
            fp8_recipe=config.model.fp8_recipe,
            fp8_param=config.model.fp8_param,
            fp8_bf16_layers=config.model.fp8_bf16_layers,
            int4_experts=config.model.int4_experts if role in (POLICY, REFERENCE) else 0,
            deterministic=config.run.deterministic,
            freeze=spec.trained.freeze if spec.trained is not None else (),
            chat_template=str(Path(config.run_folder) / TEMPLATE_FILE),
            collision=role == POLICY and config.needs_collision,
            **dict(chain.from_iterable(fields(config, role).items() for fields in functions("run", "model_options"))),
            experts=ExpertBalance(**spec.trained.experts.model_dump()) if spec.trained is not None else ExpertBalance(),
            megatron=megatron_of(config, role),
            section=f"{spec.section or role}.megatron",
        )
        optimizer = None
        if spec.trained is not None:
            others = (POLICY,) if role == CRITIC else (CRITIC,)
            rules = skip_rules(config.run.guards, role, config.metric_prefix(role), others=others)
            settings = spec.trained.optimizer.model_dump()
            settings["groups"] = tuple(ParameterGroup(**group) for group in settings["groups"])
            per_step = config.optimizer_steps_per_step
            optimizer = OptimizerOptions(**settings, total_steps=self.updates, updates_per_step=per_step, skip_rules=rules)
        phase, deadline_s = f"loading of {role}", self._deadlines.start_s
        answers = group.call(RankCalls.add_role, role, options, optimizer, phase=phase, deadline_s=deadline_s)
        if role == POLICY:
            self.optimizer = answers[0]
            self.device = group.call(RankCalls.device_name, phase=phase, deadline_s=deadline_s)[0]
            gpu = gpu_called(self.device)
            self.peak_flops = gpu.peak_flops(fp8=config.model.fp8 != "none") if gpu is not None else None
        if role not in self.loaded:
            self.loaded.append(role)

    def _core_attention(self, role: str) -> str:
        """The layer spec's own, or that of an option, which shares prefixes under any spec."""
        if not self.share_prefix or self.layer_spec == "reference":
            return "spec"
        platform, megatron = self.group_of(role).platform, megatron_of(self.config, role)
        arguments = (self.specs[role].path, platform, self.config.model.dtype, megatron)
        return next((choice.NAME for choice in parts("attention_choice") if choice.fits(*arguments)), "spec")

    def _can_share(self, role: str) -> bool:
        """Return whether attention of `role` takes streams whose sequences share prefixes."""
        return self.layer_spec == "reference" or self._core_attention(role) != "spec"

    def describe(self) -> str:
        """Describe how the policy is computed and updated, for the start of a run."""
        model = self.config.model
        in_fp8 = f" in FP8 ({model.fp8}, {model.fp8_recipe})" if model.fp8 != "none" else f" in {model.dtype}"
        untested = untested_pair(self.layer_spec, version("megatron-core"))
        warning = f" (warning: {untested})" if untested is not None else ""
        shared = "computed once" if self.share_prefix and self._can_share(POLICY) else "computed for each response"
        return f"layer spec {self.layer_spec}{in_fp8}{warning}, shared prefixes {shared}\noptimizer {self.optimizer}"

    def forward(
        self,
        role: str | Mapping[str, Sequence[int]],
        batch: Batch,
        names: Sequence[str],
        *,
        rows: Sequence[int] | None = None,
        at: Tensor | None = None,
        columns: Sequence[str] = (),
        top_k: TopK | None = None,
        wide: Mapping[str, int] = MappingProxyType({}),
        extra: bool = True,
    ) -> None:
        """Add the role's outputs to `batch` as columns `names`, computed without gradients.

        Several roles answer at the same time, where their processes are others, if `role` gives the rows of each; together they
        must be all rows, or all that are asked. `rows`: of these rows alone; the others' are 0. `at` bool `[B, T]`: score at
        these tokens, after having read them, instead of before each sampled one.

        The policy takes the batch's token columns, if there are any, unless `extra` is false. `columns` are sent along
        (`SCORED_IDS`); `top_k` asks for the likeliest tokens. What is then answered besides `names` becomes the columns
        `wide`, by name and width (see `megatron.step.forward`).
        """
        of_role = range(len(batch)) if rows is None else rows
        rows_of = {role: of_role} if isinstance(role, str) else role
        self.before_use()
        position = ScorePosition.of(at)
        running: list[tuple[str, Sequence[int] | None, Any]] = []
        keeps = isinstance(batch, StoredBatch) and not wide  # of several numbers per token the driver makes columns
        computed: dict[str, list[list[int]]] = {}
        for name, its in rows_of.items():
            group = self.group_of(name)
            # No replica may be without work: rows of others fill up, and nobody reads what is answered to them.
            missing = max(0, group.layout.dp - len(its))
            filling = sorted({*range(len(batch))} - {*its})[:missing] if missing else []
            of_policy = extra and name == POLICY
            replicas = [[share] for share in self._shares(name, batch, [*its, *filling], columns, at=at, extra=of_policy)]
            arguments = [(name, shares, position, top_k) for shares in group.per_rank(replicas)]
            if keeps:
                wanted = {*its}
                computed[name] = [[row for row in share.rows.tolist() if row in wanted] for [share] in replicas]
                calls = cast(StoringGroup, group).submit_stored(RankCalls.forward_stored, dict(enumerate(arguments)))
                running.append((name, None, calls))
                continue
            running.append((name, its if filling else None, group.submit(RankCalls.forward, arguments)))
        answers: list[Answers | None] = []
        stored: list[tuple[Stored, list[int]]] = []
        for name, read, submitted in running:
            phase, deadline_s = f"{name} forward", self._deadlines.step_s
            if keeps:
                storing = cast(StoringGroup, self.group_of(name))
                told = storing.wait_stored(submitted, phase=phase, deadline_s=deadline_s)
                stored += [(told[rank][1], its) for rank, its in zip(storing.reporting, computed[name], strict=True)]
                continue
            answered = self.group_of(name).wait(submitted, phase=phase, deadline_s=deadline_s)
            answers += answered if read is None else [answer and answer.of_rows(read) for answer in answered]
        if isinstance(batch, StoredBatch) and keeps:
            batch.take(names, stored)
        else:
            batch.gather(names, answers, wide, asked=rows)

    def compute(self, batch: Batch, task: RowTask) -> list[Any]:
        """Have a task done where a batch's tokens are (`TrainingSide.compute`): here, or by ranks of the policy, one of each
        replica; by a single one where there are fewer groups than replicas."""
        if not isinstance(batch, StoredBatch):
            return [task.work(batch, WHOLE, *task.common, *task.arguments(range(len(batch))))]
        self.before_use()
        return compute_on_ranks(cast(StoringGroup, self.group_of(POLICY)), batch, task, self._deadlines.step_s)

    def ask(self, role: str, question: Callable[[Any], Answer]) -> list[Answer]:
        """The answers of all ranks of `role` to an option's `question`, which gets the role's `RankModel`."""
        phase = f"{question.__name__.replace('_', ' ')} of {role}"
        return self.group_of(role).call(RankCalls.ask, role, question, phase=phase, deadline_s=self._deadlines.step_s)

    def start_update(
        self,
        role: str,
        batch: Batch,
        rows: Sequence[int],
        columns: Sequence[str],
        loss: Any,
        *,
        at: Tensor | None = None,
        keep_groups: bool = False,
        mixed_in: tuple[Batch, Sequence[str]] | None = None,
        applies: bool = True,
        shown_as: str | None = None,
    ) -> Any:
        """Begin one optimizer step of `role` on `rows`; give the result to `finish_updates`.

        Unless it `applies`, it gathers gradients alone, for `optimizer_step`. `at` is as in `forward`. `keep_groups`: no group
        is split over micro-batches, since the loss compares its members.
        `mixed_in`: a further batch, all of whose rows join the step in micro-batches of their own, and its columns.
        `shown_as`: the column of a batch in a store that the log-probs which the loss shows go into; of other batches they come
        with the metrics.
        """
        self.before_use()
        group = self.group_of(role)
        of_batches = [self._shares(role, batch, rows, columns, at=at, keep_groups=keep_groups, extra=role == POLICY)]
        if mixed_in is not None:
            of_batches.append(self._shares(role, mixed_in[0], range(len(mixed_in[0])), mixed_in[1]))
        replicas = [*zip(*of_batches, strict=True)]
        position = ScorePosition.of(at)
        if role == POLICY:
            self._update_flops += update_flops(
                self.flops,
                [*chain(*of_batches)],
                shared_prompts=self._can_share(role),
                position=position,
                logits=self.specs[role].head == "log_probs",
                tower_passes=1 if "vision" in self.config.policy.freeze else PASSES,
            )
        arguments = [(role, shares, loss, position, applies) for shares in group.per_rank(replicas)]
        if isinstance(batch, StoredBatch) and shown_as is not None:
            submitted = cast(StoringGroup, group).submit_stored(RankCalls.update_stored, dict(enumerate(arguments)))
            return group, submitted, (batch, shown_as, [shares[0].rows.tolist() for shares in replicas])
        return group, group.submit(RankCalls.update, arguments), None

    def finish_updates(self, updates: Sequence[Any]) -> list[dict[str, Any]]:
        """Wait for updates and return each one's metrics (see `combine`)."""
        results = []
        for group, submitted, shown in updates:
            phase, deadline_s = f"{group.name} update", self._deadlines.step_s
            if shown is None:
                results.append(combine(group.wait(submitted, phase=phase, deadline_s=deadline_s)))
                continue
            (batch, column, rows), told = shown, group.wait_stored(submitted, phase=phase, deadline_s=deadline_s)
            batch.take_further(column, [(told[rank][1], its) for rank, its in zip(group.reporting, rows, strict=True)])
            results.append(combine([metrics for metrics, _ in told.values()]))
        return results

    def optimizer_step(self, role: str) -> dict[str, Any]:
        """Apply the gradients of the updates of `role` that did not; metrics as of an update, without the loss's."""
        self.before_use()
        phase, deadline_s = f"{role} optimizer step", self._deadlines.step_s
        return combine(self.group_of(role).call(RankCalls.optimizer_step, role, phase=phase, deadline_s=deadline_s))

    def copy_weights(self, source: str, target: str, share: float = 1.0) -> None:
        """`target` ← share·`source` + (1 − share)·`target`; both must live in the same ranks and layout."""
        self.before_use()
        group, phase = self.group_of(target), f"copy of {source}"
        group.call(RankCalls.copy_role, source, target, share, phase=phase, deadline_s=self._deadlines.step_s)

    def export(self, role: str, folder: str, *, merged: bool = False) -> None:
        """Write what was trained of `role` as a Hugging Face folder, whole or not at all; a policy's adapters as a PEFT folder.

        `merged`: the weights of the whole model, to which adapters are added.
        """
        adapters = role == POLICY and self.config.policy.has_adapters and not merged
        self.before_use()
        group, phase = self.group_of(role), f"export of {role}"
        group.call(RankCalls.export_role, role, folder, adapters, phase=phase, deadline_s=self._deadlines.save_s)

    def keep_on_device(self, what: str) -> None:
        """Have `all` roles on the device, the `policy`'s weights alone, or `none`."""
        for group in self.groups.values():
            group.call(RankCalls.keep_on_device, what, phase="offload", deadline_s=self._deadlines.step_s)

    def open_senders(
        self, targets: Mapping[int, Any], transport: str, deadline_s: float, engines: int, machines: Machines | None = None
    ) -> None:
        """Connect the policy's ranks to engines by number; `engines` are all that the run has, on several `machines` or on one.

        Engines that were restarted are connected anew, the others are left as they are. One that is not reached, or takes
        longer than half of `deadline_s`, is an error of the next push.
        """
        group, phase = self.groups[POLICY], "connection to the engines"
        self._connections += 1
        arguments = targets, transport, deadline_s / 2, engines, self._connections, machines
        group.call(RankCalls.open_senders, *arguments, phase=phase, deadline_s=deadline_s)

    def push(
        self,
        deadline_s: float,
        bases: Mapping[int, int | None] | None = None,
        version: int | None = None,
        *,
        verify: bool = True,
    ) -> UpdateSummary:
        """Send the policy to the engines in `bases` (None: all).

        `bases[engine]` is the version whose weights the engine has and which only the changes since are sent to, or None.
        `version` is that of the weights now, for later changes to be told from; without it nothing is remembered. Without
        `verify` no checksums are taken.
        """
        return UpdateSummary.of(
            self.groups[POLICY].call(
                RankCalls.update_engines, POLICY, bases, version, verify, phase="weight sync", deadline_s=deadline_s
            )
        )

    def sent_checksums(self, asked: Mapping[int, Collection[int]], deadline_s: float) -> dict[int, dict[SliceKey, str]]:
        """By engine the checksums of what the last push sent to those of its ranks that are asked for, box by box."""
        answers = self.groups[POLICY].call(RankCalls.sent_checksums, asked, phase="weight sync", deadline_s=deadline_s)
        sent: dict[int, dict[SliceKey, str]] = {engine: {} for engine in asked}
        for answer in answers:
            for engine, checksums in answer.items():
                sent[engine] |= checksums
        return sent

    def start_profile(self, folder: str, ranks: Sequence[int]) -> None:
        """Have these ranks of every group record what they compute, into `<folder>/<group>-<rank>.*`."""
        for name, group in self.groups.items():
            files = [(f"{folder}/{name}-{rank}" if rank in ranks else None,) for rank in range(group.layout.world_size)]
            group.wait(group.submit(RankCalls.start_profile, files), phase="profile", deadline_s=self._deadlines.step_s)

    def stop_profile(self) -> None:
        """End the recording and write it."""
        for group in self.groups.values():
            group.call(RankCalls.stop_profile, phase="profile", deadline_s=self._deadlines.step_s)

    def take_records(self) -> dict[str, list[RankRecord]]:
        """By group what each rank did since the last call."""
        limit_s = self._deadlines.step_s
        return {
            name: group.call(RankCalls.take_record, phase="trace", deadline_s=limit_s) for name, group in self.groups.items()
        }

    def take_update_flops(self) -> UpdateFlops:
        """Operations of the policy's updates since the last call (see `models/flops.update_flops`)."""
        taken, self._update_flops = self._update_flops, UpdateFlops()
        return taken

    def save(self, folder: str) -> None:
        """Have every role that changes during the run written into a folder of its own below `folder`, in the background.

        The roles may change again on return; `saved` tells when they are written.
        """
        self.before_use()
        self._saving = self.changing()
        for role in self._saving:
            group, part = self.group_of(role), f"{folder}/{role}"
            group.call(RankCalls.save_role, role, part, phase="save", deadline_s=self._deadlines.save_s)

    def saved(self, *, wait: bool) -> JoinFiles | None:
        """The function that makes checkpoints of what was written since `save`; None if some ranks are not done and `wait` is
        not asked for.

        Raises:
            CheckpointError: a rank could not write its part; names the file.
        """
        written: dict[str, list[Written]] = {}
        for role in self._saving:
            group = self.group_of(role)
            parts = group.call(RankCalls.saved_role, role, wait, phase="save", deadline_s=self._deadlines.save_s)
            written[role] = [part for part in parts if part is not None]
            if len(written[role]) < len(parts):
                return None
        return partial(join_roles, written)

    def restore(self, folder: str, roles: Sequence[str] | None = None) -> None:
        """Read back a checkpoint of a run; every role of it unless `roles` says which."""
        check_pickles(folder)
        self.before_use()
        for role in roles or self.changing():
            group, part = self.group_of(role), f"{folder}/{role}"
            group.call(RankCalls.load_role, role, part, phase="resume", deadline_s=self._deadlines.save_s)

    def group_of(self, role: str) -> RankGroup:
        """The ranks that hold `role`."""
        return self.groups[role if role in self.groups else POLICY]

    @property
    def _deadlines(self) -> Any:
        return self.config.resources.deadlines

    def changing(self) -> list[str]:
        """Roles whose weights a checkpoint must keep: trained ones, and a reference that is moved towards the policy."""
        moving = {REFERENCE} if self.config.reference.reset_every else set()
        return [role for role in self.loaded if self.specs[role].trained is not None or role in moving]

    def _shares(
        self,
        role: str,
        batch: Batch,
        rows: Sequence[int],
        columns: Sequence[str],
        *,
        at: Tensor | None = None,
        keep_groups: bool = False,
        extra: bool = False,
    ) -> list[Share]:
        """For every data-parallel replica of the role its micro-batches."""
        group = self.group_of(role)
        shared = (self.share_prefix and self._can_share(role)) or keep_groups
        copied = not shared and batch.prompts_show_pictures  # a micro-batch computes a picture once, however many show it
        apart = bool(extra and batch.extra) or (role == POLICY and self.config.routing_replay != "none")  # see `step.py`
        units = batch.unit_rows(rows, share_prefix=shared or copied, share_turns=not apart)
        limit = (self.specs[role].trained or self.config.policy).max_tokens_per_micro_batch
        plan = self._plan(
            units.sizes,
            ranks=group.layout.dp,
            max_tokens=limit,
            flops=self.flops,
            whole_units=keep_groups,
            copied_prompts=copied,
        )
        if copied:
            units, plan = units.with_copied_prompts(plan)
        return batch.shares(units, plan, columns, mask=at, extra=extra)
