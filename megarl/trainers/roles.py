"""The training side of a run as the driver sees it: which role lives in which group of ranks, and calls to them.

Data-parallel ranks get their share once, through Ray's object store; all ranks of a replica read the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.plan import FlopsModel, UnitSize, plan_micro_batches
from megarl.data.stream import MicroBatch, Unit
from megarl.megatron.options import ModelOptions, OptimizerOptions
from megarl.trainers.objectives import combine
from megarl.workers.cluster import GroupRequest
from megarl.workers.group import WorkerGroup, wait_for

POLICY, REFERENCE, CRITIC, REWARD_MODEL = "policy", "reference", "critic", "reward_model"


def group_requests(config: Config) -> list[GroupRequest]:
    """The groups of ranks that `config` needs; a reference without a layout of its own lives in the policy's."""
    requests = [GroupRequest(POLICY, config.policy.layout, config.policy.threads_per_rank)]
    if config.reference.layout is not None and config.uses_reference:
        requests.append(GroupRequest(REFERENCE, config.reference.layout, None))
    if config.uses_critic:
        requests.append(GroupRequest(CRITIC, config.critic.layout, config.critic.threads_per_rank))
    if config.uses_reward_model:
        requests.append(GroupRequest(REWARD_MODEL, config.reward_model.layout, None))
    return requests


class Roles:
    """Policy, reference, critic and reward model behind `forward` and `update`."""

    def __init__(self, config: Config, groups: dict[str, WorkerGroup], layer_spec: str, flops: FlopsModel) -> None:
        self.config, self.groups, self.layer_spec, self.flops = config, groups, layer_spec, flops
        # Only the reference attention knows prefixes; other layer specs run each response with a prompt of its own.
        self.share_prompts = config.policy.share_prompts and layer_spec == "reference"

    def load(self, role: str) -> None:
        """Build `role` on its ranks and load its weights."""
        config, group = self.config, self.group_of(role)
        trained = {POLICY: config.policy, CRITIC: config.critic}.get(role)
        path = {
            POLICY: config.model.path,
            REFERENCE: config.reference.path or config.model.path,
            CRITIC: config.critic.init_from or config.model.path,
            REWARD_MODEL: config.reward_model.path or config.model.path,
        }[role]
        options = ModelOptions(
            path,
            group.layout,
            head="log_probs" if role in (POLICY, REFERENCE) else "value",
            layer_spec=self.layer_spec,
            dtype=config.model.dtype,
            recompute=config.model.recompute,
            temperature=config.rollout.temperature,
            logit_chunk_tokens=(trained or config.policy).logit_chunk_tokens,
            trainable=trained is not None,
        )
        optimizer = None
        if trained is not None:
            settings = trained.optimizer.model_dump()
            updates = config.run.steps * config.algorithm.mini_batches * config.algorithm.epochs
            optimizer = OptimizerOptions(**settings, total_steps=updates)
        self._call(group, "add_role", (role, options, optimizer), f"loading of {role}", self._deadlines.start_s)

    def drop(self, role: str) -> None:
        """Free a role's memory."""
        self._call(self.group_of(role), "drop_role", (role,), f"dropping of {role}", self._deadlines.step_s)

    def forward(self, role: str, batch: Batch, names: Sequence[str], *, score_last: bool = False) -> None:
        """Add the role's outputs to `batch` as columns `names`, computed without gradients."""
        group = self.group_of(role)
        shares = self._shares(role, batch, range(len(batch)), [])
        arguments = [(role, share, score_last) for share in shares]
        answers = group.call("forward", arguments, phase=f"{role} forward", deadline_s=self._deadlines.step_s)
        batch.gather(names, answers)

    def start_update(self, role: str, batch: Batch, rows: Sequence[int], columns: Sequence[str], loss: Any) -> Any:
        """Begin one optimizer step of `role` on `rows`; give the result to `finish_updates`."""
        group = self.group_of(role)
        shares = self._shares(role, batch, rows, columns)
        return group, group.submit("update", [(role, share, loss) for share in shares])

    def finish_updates(self, updates: Sequence[Any]) -> list[dict[str, float]]:
        """Wait for updates and return each one's metrics."""
        results = []
        for group, references in updates:
            deadline_s = self._deadlines.step_s
            answers = wait_for(references, phase=f"{group.name} update", deadline_s=deadline_s, group=group)
            results.append(combine(answers))
        return results

    def open_senders(self, targets: Sequence[Any], transport: str, deadline_s: float) -> None:
        """Connect the policy's ranks to the engines, one stage after the other (each may open a process group)."""
        for actor in self.groups[POLICY].actors:
            reference = actor.open_senders.remote(list(targets), transport)
            wait_for([reference], phase="connection to the engines", deadline_s=deadline_s)

    def push_weights(self, deadline_s: float) -> list[dict[str, str]]:
        """Send the policy to the engines; per engine the checksum of every tensor sent."""
        answers = self.groups[POLICY].call("push_weights", (POLICY,), phase="weight sync", deadline_s=deadline_s)
        merged: list[dict[str, str]] = [{} for _ in max(answers, key=len)]
        for answer in answers:
            for engine, checksums in enumerate(answer):
                merged[engine] |= checksums
        return merged

    def save(self, folder: str) -> None:
        """Write every trained role into a folder of its own below `folder`."""
        for role in self._trained():
            self._call(self.group_of(role), "save_role", (role, f"{folder}/{role}"), "save", self._deadlines.save_s)

    def restore(self, folder: str, roles: Sequence[str] | None = None) -> None:
        """Read trained roles back; all of them unless `roles` says which."""
        for role in roles or self._trained():
            self._call(self.group_of(role), "load_role", (role, f"{folder}/{role}"), "resume", self._deadlines.save_s)

    def group_of(self, role: str) -> WorkerGroup:
        """The ranks that hold `role`."""
        return self.groups[role if role in self.groups else POLICY]

    @property
    def _deadlines(self) -> Any:
        return self.config.resources.deadlines

    def _trained(self) -> list[str]:
        return [POLICY, CRITIC] if self.config.uses_critic else [POLICY]

    def _call(self, group: WorkerGroup, method: str, arguments: tuple[Any, ...], phase: str, deadline_s: float) -> None:
        group.call(method, arguments, phase=phase, deadline_s=deadline_s)

    def _shares(self, role: str, batch: Batch, rows: Sequence[int], columns: Sequence[str]) -> list[Any]:
        """For every rank of the role's group, a reference to its replica's micro-batches."""
        group = self.group_of(role)
        units = batch.units(rows, columns, share_prompts=self.share_prompts)
        limit = (self.config.critic if role == CRITIC else self.config.policy).max_tokens_per_micro_batch
        sizes = [UnitSize(len(u.prompt_ids), tuple(len(r.token_ids) for r in u.responses)) for u in units]
        plan = plan_micro_batches(sizes, ranks=group.layout.dp, max_tokens=limit, flops=self.flops)
        return group.share([[_part(units, micro_batch) for micro_batch in share] for share in plan])


def _part(units: Sequence[Unit], micro_batch: Sequence[tuple[int, Sequence[int]]]) -> MicroBatch:
    return [
        Unit(units[unit].prompt_ids, [units[unit].responses[place] for place in responses]) for unit, responses in micro_batch
    ]
