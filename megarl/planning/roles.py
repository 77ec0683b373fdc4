"""Which models a run holds and on which GPUs: the roles of its config, the processes they share, and the engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from megarl.config import Config, SupervisedConfig, batch_arithmetic
from megarl.config.batch import BatchArithmetic
from megarl.config.layout import Layout
from megarl.config.schema import TrainedRole
from megarl.models.registry import load_hf_config
from megarl.planning.shape import ModelShape
from megarl.reshard.block_scales import fp8_scales, quantised_map
from megarl.reshard.plan import ReshardPlan, plan_reshard
from megarl.reshard.run_plan import ITEMSIZE, target_of_run
from megarl.reshard.slices import engine_slices
from megarl.reshard.targets import EVERY_RANK, Target, check_target
from megarl.reshard.tensors import TensorTable


@dataclass(frozen=True)
class Role:
    """A model of the run. `group` names the processes it lives in; `trained` is None of one that only answers."""

    name: str
    group: str
    shape: ModelShape
    layout: Layout
    value_head: bool
    trained: TrainedRole | None
    max_tokens: int
    logit_chunk_tokens: int | None


@dataclass(frozen=True)
class Engines:
    """The engines of a run, which take the weights of `trainer`'s ranks and serve them in FP8 if `fp8`.

    `max_total_tokens` and `memory_fraction` are SGLang's arguments, where the config gives them.
    """

    target: Target
    trainer: Layout
    shape: ModelShape
    itemsize: int
    fp8: bool
    max_total_tokens: int | None
    memory_fraction: float | None

    @property
    def plan(self) -> ReshardPlan:
        """The way of the weights to the engines."""
        return _reshard_plan(self.shape, self.trainer, self.target, self.itemsize, self.fp8)

    @property
    def weight_bytes(self) -> int:
        """The most that a rank of an engine holds of the weights."""
        return self._held[0]

    @property
    def expert_share(self) -> float:
        """How much of the weights are experts'."""
        return self._held[1]

    @property
    def _held(self) -> tuple[int, float]:
        return _weights(self.shape, replace(self.target, whole="none", engines=1), self.itemsize, self.fp8)

    @property
    def kv_bytes_per_token(self) -> float:
        """Of a rank that holds this token: KV heads are split over tp and at least one on each, latents are whole on each."""
        shape, tp = self.shape, self.target.tp
        width = shape.cached if shape.latent else 2 * max(shape.kv_heads / tp, 1) * shape.head_dim
        return shape.layers * width * self.itemsize


@lru_cache(maxsize=32)
def _reshard_plan(shape: ModelShape, trainer: Layout, target: Target, itemsize: int, fp8: bool) -> ReshardPlan:
    return plan_reshard(shape.config, trainer, target, itemsize=itemsize, fp8=fp8)


@cache
def _weights(shape: ModelShape, target: Target, itemsize: int, fp8: bool) -> tuple[int, float]:
    """(bytes of the fullest rank of an engine, share of the model that is experts')."""
    check_target(shape.config, target)
    tensors = TensorTable.of(quantised_map(shape.weight_map) if fp8 else shape.weight_map, itemsize)
    held = engine_slices(tensors, target, shape.experts)
    nbytes = held.rows * held.cols * tensors.itemsize[held.tensor]
    of_ranks = np.bincount(held.engine_rank - EVERY_RANK, weights=nbytes, minlength=target.ranks - EVERY_RANK)
    of_experts = tensors.nbytes[tensors.expert >= 0].sum() / tensors.nbytes.sum()
    return int(of_ranks[0] + of_ranks[-EVERY_RANK:].max()), float(of_experts)


@dataclass(frozen=True)
class RunShape:
    """All that a plan is made from: roles in the order in which they are loaded, engines (None: nothing is sampled)."""

    config: Config | SupervisedConfig
    roles: tuple[Role, ...]
    engines: Engines | None
    batch: BatchArithmetic | None

    @property
    def groups(self) -> dict[str, Layout]:
        """Layout by group of processes, in the order in which they are placed."""
        return {role.group: role.layout for role in self.roles}

    @property
    def colocated(self) -> bool:
        """Whether all share the same GPUs."""
        return self.config.resources.placement == "colocated"

    @property
    def places(self) -> dict[str, range]:
        """GPUs by group, the engines' under `engine` (`workers/cluster.py` places them so)."""
        sizes = {name: layout.world_size for name, layout in self.groups.items()}
        if self.engines is not None:
            sizes["engine"] = self.engines.target.engines * self.engines.target.ranks
        found, start = {}, 0
        for name, size in sizes.items():
            found[name] = range(start, start + size)
            start += 0 if self.colocated else size
        return found

    @property
    def gpus(self) -> int:
        """GPUs that the run takes."""
        return max(place.stop for place in self.places.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return longest_of(self.config)


def longest_of(config: Config | SupervisedConfig) -> int:
    """Tokens of the longest sequence that a config allows."""
    if isinstance(config, SupervisedConfig):
        return config.data.max_tokens
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def run_shape(config: Config | SupervisedConfig) -> RunShape:
    """The roles and engines of a config.

    Raises:
        MegarlError: a model's config cannot be read, or a layout or the engines cannot hold it.
    """
    policy, model = config.policy, config.model.path
    value = isinstance(config, SupervisedConfig) and config.has_value_head
    roles = [_role("policy", "policy", model, policy.layout, policy, policy, value=value)]
    if not isinstance(config, SupervisedConfig) and config.uses_critic:
        critic = config.critic
        roles.append(_role("critic", "critic", critic.init_from or model, critic.layout, critic, critic, value=True))
    if config.uses_reference:
        roles.append(_frozen("reference", config.reference.path or model, config.reference.layout, policy, value=False))
    if isinstance(config, SupervisedConfig):
        return RunShape(config, tuple(roles), None, None)
    if config.uses_reward_model:
        scorer = config.reward_model
        roles.append(_frozen("reward_model", scorer.path or model, scorer.layout, policy, value=True))
    has_engines = config.rollout.engine != "replay" and config.rollout.sync != "disk"
    engines = _engines(config) if has_engines else None
    return RunShape(config, tuple(roles), engines, batch_arithmetic(config))


def _role(
    name: str, group: str, path: str, layout: Layout, trained: TrainedRole | None, sizes: TrainedRole, *, value: bool
) -> Role:
    tokens, chunk = sizes.max_tokens_per_micro_batch, sizes.logit_chunk_tokens
    return Role(name, group, ModelShape.read(path), layout, value, trained, tokens, chunk)


def _frozen(name: str, path: str, layout: Layout | None, policy: TrainedRole, *, value: bool) -> Role:
    """A role that only answers, in the policy's processes unless it has a layout of its own."""
    return _role(name, name if layout else "policy", path, layout or policy.layout, None, policy, value=value)


def _engines(config: Config) -> Engines:
    arguments = config.rollout.engine_args
    fraction, served = arguments.get("mem_fraction_static"), arguments.get("model_path")
    return Engines(
        target=target_of_run(config),
        trainer=config.policy.layout,
        shape=ModelShape.read(config.model.path),
        itemsize=ITEMSIZE[config.model.dtype],
        fp8=served is not None and fp8_scales(load_hf_config(str(served))) is not None,
        max_total_tokens=arguments.get("max_total_tokens"),
        memory_fraction=None if fraction is None else float(fraction),
    )
