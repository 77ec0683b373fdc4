"""The models that a run holds, and their GPUs: the roles of its config, the processes they share, and the engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import numpy as np

from megarl.config import AnyConfig
from megarl.config.engine_kinds import capabilities_of
from megarl.config.layout import Layout
from megarl.config.questions import ConfiguredRole
from megarl.config.sections import TrainedRole
from megarl.models.adapters import AdapterSpec, adapters_of
from megarl.models.registry import load_hf_config
from megarl.models.shape import ModelShape
from megarl.models.weight_formats import WeightFormat, engine_format
from megarl.option_list import functions
from megarl.planning.activations import Precision
from megarl.planning.optimizer_bytes import StateBytes, state_bytes
from megarl.planning.parameters import NOTHING_HELD, ParameterCounts, stage_parameters
from megarl.weights.plan import LOAD_BYTES, ReshardPlan, bucket_of_load, plan_reshard
from megarl.weights.run_plan import ITEMSIZE, sent_adapters, target_of_run
from megarl.weights.sglang_targets import EVERY_RANK, EngineTarget, check_target
from megarl.weights.slices import engine_slices
from megarl.weights.tensors import TensorTable


@dataclass(frozen=True)
class PlannedRole:
    """A model of the run. `group` names the processes it lives in; `trained` is None of one that only answers.

    `averaged`: its weights are a moving average of the policy's. `shares_weights`: they are the policy's, but for its adapters.
    `kept_models`: models whose state a rank keeps in main memory, each in its turn in the role's place.
    """

    name: str
    group: str
    shape: ModelShape
    layout: Layout
    value_head: bool
    trained: TrainedRole | None
    max_tokens: int
    logit_chunk_tokens: int | None
    averaged: bool = False
    shares_weights: bool = False
    kept_models: int = 0

    @property
    def freeze(self) -> tuple[str, ...]:
        """Parts and patterns of what is not trained, of a role that is."""
        return self.trained.freeze if self.trained is not None else ()

    @property
    def parameters(self) -> tuple[ParameterCounts, ...]:
        """The parameters that a rank of each stage holds."""
        if self.shares_weights:
            return (NOTHING_HELD,) * self.layout.pp
        return stage_parameters(self.shape, self.layout, value_head=self.value_head, freeze=self.freeze)

    @property
    def adapters(self) -> int:
        """Parameters of all adapters of the whole model."""
        return sum(stage.adapters for stage in stage_parameters(self.shape, Layout()))

    def state_bytes(self, itemsize: int, fp8_recipe: str | None) -> StateBytes:
        """Bytes of gradients and optimizer state of a role that is trained, for weights of `itemsize` bytes."""
        return state_bytes(self.trained.megatron if self.trained is not None else {}, itemsize, fp8_recipe)

    def rounded_experts(self, stage: int, precision: Precision) -> list[float]:
        """Bytes of the rounded copy of each layer's experts that a micro-batch's backward pass needs; none: not rounded."""
        if not (precision.rounds_experts and self.name == "policy"):
            return []
        layers = {layer for chunk in self.layout.stage_layers(self.shape.layers)[stage] for layer in chunk}
        with_experts = len(layers & set(self.shape.expert_layers))
        return [self.parameters[stage].expert * precision.itemsize / max(1, with_experts)] * with_experts


ADAPTER_PLACES = 2
"""Places of an SGLang server: the policy's adapters, and one that stays empty, for requests without any."""


@dataclass(frozen=True)
class Engines:
    """The engines of a run, which take the weights of `trainer`'s ranks and serve them in `format` (None: as they are).

    `max_total_tokens` and `memory_fraction` are SGLang's arguments, where the config gives them. `transport`: as
    `rollout.weight_transport`. `lora`: the adapters that engines add themselves; None: none. `adapter_places`: on a rank's GPU.
    `kept_models`: models whose adapters each rank keeps whole in main memory. `cache_itemsize`: bytes of a number of keys and
    values; None: `itemsize`.
    """

    target: EngineTarget
    trainer: Layout
    shape: ModelShape
    itemsize: int
    format: WeightFormat | None
    max_total_tokens: int | None
    memory_fraction: float | None
    transport: str
    lora: AdapterSpec | None = None
    adapter_places: int = ADAPTER_PLACES
    kept_models: int = 0
    cache_itemsize: int | None = None

    @property
    def stages_weights(self) -> bool:
        """Return whether training ranks hand weights over in buffers."""
        return self.transport in ("shared_memory", "rdma")

    @property
    def relays_weights(self) -> bool:
        """Return whether weights for an engine on another machine go by way of a rank there."""
        return self.transport == "shared_memory"

    @property
    def plan(self) -> ReshardPlan:
        """The way of the weights to the engines."""
        return _reshard_plan(self.shape, self.trainer, self.target, self.itemsize, self.format, self.lora)

    @property
    def weight_bytes(self) -> int:
        """The most that a rank of an engine holds of the weights."""
        return self._held[0]

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the places that a rank of an engine has for adapters which it adds, each split as its weights are."""
        return self.adapter_places * self._adapters(self.target.tp)

    @property
    def kept_bytes(self) -> int:
        """Bytes in main memory of the adapters of models that are kept there, of a rank."""
        return self.kept_models * self._adapters(1)

    def _adapters(self, tp: int) -> int:
        if self.lora is None:
            return 0
        return sum(stage.adapters for stage in stage_parameters(self.adapted, Layout(tp=tp))) * self.itemsize

    @property
    def adapted(self) -> ModelShape:
        """The model with the adapters that the engines add."""
        return _with_lora(self.shape, self.lora)

    @property
    def expert_share(self) -> float:
        """The experts' share of the weights."""
        return self._held[1]

    @cached_property
    def _held(self) -> tuple[int, float]:
        return _weights(self.shape, replace(self.target, whole="none", engines=1), self.itemsize, self.format)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes on a rank that holds this token: KV heads are split over tp and at least one on each, latents are whole
        on each."""
        shape = self.shape
        width = shape.attention_layers * shape.cached if shape.latent else shape.kv_width(self.target.tp)
        return width * (self.cache_itemsize or self.itemsize)

    @property
    def state_bytes_per_sequence(self) -> float:
        """Bytes of the states of linear attention of a sequence, on a rank."""
        linear = self.shape.linear
        return 0.0 if linear is None else len(linear.layers) * linear.state_bytes(self.itemsize) / self.target.tp

    def cached_bytes_per_token(self, length: float) -> float:
        """Keys, values and states of a rank by token, for sequences of `length` tokens."""
        return self.kv_bytes_per_token + self.state_bytes_per_sequence / length


@lru_cache(maxsize=32)
def _reshard_plan(
    shape: ModelShape,
    trainer: Layout,
    target: EngineTarget,
    itemsize: int,
    format: WeightFormat | None,
    lora: AdapterSpec | None,
) -> ReshardPlan:
    return plan_reshard(
        shape.config,
        trainer,
        target,
        itemsize=itemsize,
        bucket_bytes=bucket_of_load(LOAD_BYTES["cuda"], target),
        format=format,
        predicts=shape.predicts,
        lora=lora,
    )


@cache
def _weights(shape: ModelShape, target: EngineTarget, itemsize: int, format: WeightFormat | None) -> tuple[int, float]:
    """(bytes of the fullest rank of an engine, share of the model that is experts')."""
    check_target(shape.config, target)
    tensors = TensorTable.of(format.quantised_map(shape.weight_map) if format else shape.weight_map, itemsize)
    slices = engine_slices(tensors, target, shape.experts)
    nbytes = slices.rows * slices.cols * tensors.itemsize[slices.tensor]
    of_ranks = np.bincount(slices.engine_rank - EVERY_RANK, weights=nbytes, minlength=target.ranks - EVERY_RANK)
    of_experts = tensors.nbytes[tensors.expert >= 0].sum() / tensors.nbytes.sum()
    return int(of_ranks[0] + of_ranks[-EVERY_RANK:].max()), float(of_experts)


@dataclass(frozen=True)
class RunShape:
    """All that a plan is made from: roles in the order in which they are loaded, engines (None: nothing is sampled)."""

    config: AnyConfig
    roles: tuple[PlannedRole, ...]
    engines: Engines | None

    @property
    def groups(self) -> dict[str, Layout]:
        """Layout by group of processes, in the order in which they are placed."""
        return {role.group: role.layout for role in self.roles}

    @property
    def lent(self) -> Engines | None:
        """The engines that GPUs of the trainer are lent to, which are counted as having the first; None: there are none."""
        sampling = self.config.sampling
        if self.engines is None or sampling is None or not sampling.lent_engines:
            return None
        return replace(self.engines, target=replace(self.engines.target, engines=sampling.lent_engines))

    @property
    def colocated(self) -> bool:
        """Return whether all share the same GPUs."""
        return self.config.resources.placement == "colocated"

    @property
    def places(self) -> dict[str, range]:
        """GPUs by group, the engines' under `engine`, counted from the first on; in a run `weights/placement.py` chooses."""
        sizes = {name: layout.world_size for name, layout in self.groups.items()}
        if self.engines is not None:
            sizes["engine"] = self.engines.target.engines * self.engines.target.ranks
        places, start = {}, 0
        for name, size in sizes.items():
            places[name] = range(start, start + size)
            start += 0 if self.colocated else size
        if self.lent:
            places["lent"] = range(self.lent.target.engines * self.lent.target.ranks)
        return places

    @property
    def gpus(self) -> int:
        """GPUs that the run takes."""
        return max(gpus.stop for gpus in self.places.values())


def run_shape(config: AnyConfig) -> RunShape:
    """The roles and engines of a config.

    Raises:
        MegarlError: a model's config cannot be read, or a layout or the engines cannot hold it.
    """
    sampling = config.sampling
    has_engines = sampling is not None and capabilities_of(sampling).weights in ("slices", "tensors")
    return RunShape(config, tuple(_role(config, role) for role in config.roles), _engines(config) if has_engines else None)


def role_shape(role: ConfiguredRole) -> ModelShape:
    """The sizes of a role's model, with its adapters if it trains some.

    Raises:
        MegarlError: its config, or its adapters, cannot be read, or adapters are for layers that it does not have.
    """
    if role.trained is None:
        return ModelShape.read(role.folder)
    shape, field = ModelShape.read(role.folder, predicts=role.trained.predicts), f"{role.name}.lora"
    return _with_lora(shape, adapters_of(role.trained, shape.config, field), field)


@lru_cache(maxsize=8)
def _with_lora(shape: ModelShape, lora: AdapterSpec | None, field: str = "policy.lora") -> ModelShape:
    return shape.with_lora(lora, field)


def _role(config: AnyConfig, role: ConfiguredRole) -> PlannedRole:
    """A role that only answers lives in the policy's processes unless it has a layout of its own."""
    group, sizes = "policy" if role.layout is None else role.name, role.trained or config.policy
    kept = sum(kept_models(config) for kept_models in functions("plan", "kept_models")) if role.trained is not None else 0
    return PlannedRole(
        role.name,
        group,
        role_shape(role),
        role.layout or config.policy.layout,
        role.value_head,
        role.trained,
        sizes.max_tokens_per_micro_batch,
        sizes.logit_chunk_tokens,
        averaged=role.name == "reference" and config.reference.reset_share != 1,
        shares_weights=role.name == "reference" and config.reference.is_policy_as_it_began(config.policy, config.model.path),
        kept_models=kept,
    )


def _engines(config: AnyConfig) -> Engines:
    assert config.sampling is not None
    arguments = config.sampling.engine_args
    fraction, served = arguments.get("mem_fraction_static"), config.sampling.servers.model_path
    of_many = next(filter(None, (places(config) for places in functions("plan", "engine_places"))), None)
    lora, places, kept = of_many or (sent_adapters(config), ADAPTER_PLACES, 0)
    return Engines(
        target=replace(target_of_run(config.sampling), engines=config.sampling.engines),
        trainer=config.policy.layout,
        shape=ModelShape.read(config.model.path, predicts=config.syncs_prediction),
        itemsize=ITEMSIZE[config.model.dtype],
        format=engine_format(load_hf_config(str(served))) if served is not None else None,
        max_total_tokens=arguments.get("max_total_tokens"),
        memory_fraction=None if fraction is None else float(fraction),
        transport=config.sampling.weight_transport,
        lora=lora,
        adapter_places=places,
        kept_models=kept,
        cache_itemsize=next(filter(None, (size(config) for size in functions("plan", "cache_itemsize"))), None),
    )
