"""Choices that a search tries: layouts for training, how their passes are computed, and sizes of engines, as overrides
of a config."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import yaml

from megarl.config import AnyConfig
from megarl.config.engine_kinds import capabilities_of
from megarl.config.layout import Layout, divisors
from megarl.models.registry import architecture_for
from megarl.models.shape import ModelShape
from megarl.planning.gpus import GPUS_PER_NODE

LARGEST_PP, LARGEST_CP, LARGEST_EP, LARGEST_ENGINE = 64, 8, 64, 2 * GPUS_PER_NODE
MOST_SHARES = 8
"""Data parallel shares of attention of an engine."""
WIDEST_ENGINE = 8 * GPUS_PER_NODE
"""Ranks of an engine at most, where experts are spread over all of them and attention is data parallel."""
LEAST_LAYERS = 2
"""Least layers of a pipeline stage, and of a virtual one, on average: thinner ones wait for each other."""
LEAST_TOKENS = 1024
"""Least tokens of the longest sequence on a rank of context parallelism: shorter shares take longer to send than they spare."""
MOST_CHUNKS = 3
"""Different `vpp` that are tried of a number of stages."""
RECOMPUTED = ("none", "selective", "full")
"""Fastest first; each keeps less than the one before."""
SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
OF_THE_ENGINES_SIZE = ("_size", "enable_dp_attention", "max_total_tokens", "max_running_requests", "nnodes")
"""Ends of names of engine arguments that go with one number of ranks."""
OF_EXPERTS = ("ep_size", "dp_size", "attn_dp_size", "enable_dp_attention")
"""Arguments of engines that are tried where the model has experts, unless others go with one number of ranks."""

Arguments = tuple[tuple[str, Any], ...]
"""Engine arguments by name."""


@dataclass(frozen=True)
class Choice:
    """One thing to try. `layout` is every trained role's, `max_tokens` their micro-batches', and there are `engines` of
    `engine_tp` ranks (0: the config's own) with `engine_args` in the place of the config's `OF_EXPERTS` (None: its own)."""

    layout: Layout
    recompute: str
    max_tokens: int
    engine_tp: int
    engines: int
    engine_args: Arguments | None = None

    @property
    def tree(self) -> dict[str, Any]:
        """The layout as a section of the config, without what is as it is by default."""
        default = vars(Layout())
        return {name: value for name, value in vars(self.layout).items() if value != default[name]}

    def changes(self, config: AnyConfig) -> dict[str, Any]:
        """The fields in which `config` would differ, and their values."""
        changes: dict[str, Any] = {}
        if self.recompute != config.model.recompute:
            changes["model.recompute"] = self.recompute
        roles_by_name = {role.name: role for role in config.roles}
        for name in config.layouts:
            if name in type(config).model_fields and vars(roles_by_name[name].layout) != vars(self.layout):
                changes[f"{name}.layout"] = self.tree
        for name in config.trained_roles:
            trained = roles_by_name[name].trained
            if trained is not None and trained.max_tokens_per_micro_batch != self.max_tokens:
                changes[f"{name}.max_tokens_per_micro_batch"] = self.max_tokens
        sampling = config.sampling
        if sampling is not None and self.engines:
            changes |= {"rollout.tp": self.engine_tp} if sampling.tp != self.engine_tp else {}
            changes |= {"rollout.engines": self.engines} if sampling.engines != self.engines else {}
            arguments = self.arguments(sampling.engine_args)
            changes |= {"rollout.engine_args": arguments} if sampling.engine_args != arguments else {}
        return changes

    def arguments(self, configured: Mapping[str, Any]) -> Mapping[str, Any]:
        """The engines' arguments where a config has `configured`."""
        if self.engine_args is None:
            return configured
        return {name: value for name, value in configured.items() if name not in OF_EXPERTS} | dict(self.engine_args)

    def overrides(self, config: AnyConfig) -> tuple[str, ...]:
        """The same as `megarl` takes them on a command line, quoted for a shell; none: it is the config itself."""
        return tuple(f"{field}={_flow(value)}" for field, value in self.changes(config).items())


def _flow(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return shlex.quote(yaml.safe_dump(dict(value), default_flow_style=True, sort_keys=False, width=10**6).strip())


def own_choice(config: AnyConfig) -> Choice:
    """What the config itself says."""
    sampling = config.sampling
    engines = (sampling.tp, sampling.engines) if sampling is not None else (0, 0)
    layout = Layout(**vars(config.policy.layout))
    return Choice(layout, config.model.recompute, config.policy.max_tokens_per_micro_batch, *engines)


def layouts(config: AnyConfig, ranks: int) -> Iterator[Layout]:
    """Layouts of `ranks` ranks that are worth trying: powers of two, tp within a node, stages as even as the layers allow."""
    shape = ModelShape.read(config.model.path)
    for tp, pp, cp in product(powers(GPUS_PER_NODE), powers(LARGEST_PP), powers(LARGEST_CP)):
        if ranks % (tp * pp * cp) or pp > max(1, shape.layers // LEAST_LAYERS):
            continue
        if cp > 1 and config.longest_sequence < LEAST_TOKENS * cp:
            continue
        dp = ranks // (tp * pp * cp)
        for ep, etp in _expert_sizes(shape, tp, tp * cp * dp):
            yield Layout(tp, pp, cp, ep, etp, dp, sequence_parallel=tp > 1)


def with_stages(layout: Layout, layers: int) -> Layout | None:
    """The layout, with unequal first and last stages where equal ones cannot be; None: they cannot be either."""
    if layers % (layout.pp * (layout.vpp or 1)) == 0:
        return layout
    ends = layout.uneven_ends(layers)
    return replace(layout, first_stage_layers=ends[0], last_stage_layers=ends[1]) if ends else None


def with_chunks(layout: Layout, layers: int) -> list[Layout]:
    """The layout with virtual stages, for the `MOST_CHUNKS` sizes of them that lie furthest apart."""
    if layout.pp < 2:
        return []
    candidates = []
    for vpp in range(2, layers // (layout.pp * LEAST_LAYERS) + 1):
        plain = replace(layout, vpp=vpp, first_stage_layers=None, last_stage_layers=None)
        if (tried := with_stages(plain, layers)) is not None:
            candidates.append(tried)
    return candidates if len(candidates) <= MOST_CHUNKS else [candidates[0], candidates[len(candidates) // 2], candidates[-1]]


def token_sizes(config: AnyConfig) -> list[int]:
    """Tokens of micro-batches: the config's own, half, twice and four times as many."""
    configured = config.policy.max_tokens_per_micro_batch
    return [size for size in (configured // 2, configured, 2 * configured, 4 * configured) if size >= config.longest_sequence]


def engine_sizes(config: AnyConfig, ranks: int) -> list[tuple[int, int, Arguments | None]]:
    """(ranks of an engine, engines, their arguments as in `Choice`) on `ranks` GPUs; (0, 0, None) alone: they stay
    as they are, or there are none."""
    sampling = config.sampling
    if sampling is None or capabilities_of(sampling).in_process:
        return [(0, 0, None)]
    shape, arguments = ModelShape.read(config.model.path), sampling.engine_args
    experts = shape.experts
    tried = OF_EXPERTS if experts else ()
    if any(name.endswith(OF_THE_ENGINES_SIZE) for name in arguments if name not in tried):
        return [(sampling.tp, ranks // sampling.tp, None)] if sampling.tp <= ranks else []
    sizes = [size for size in powers(WIDEST_ENGINE if experts else LARGEST_ENGINE) if ranks % size == 0]
    if not experts:
        return [(size, ranks // size, None) for size in sizes]
    least_spread = 2 if "ep_size" in arguments else WIDEST_ENGINE + 1
    replicates = architecture_for(shape.config).sglang.replicates_attention
    return [
        (size, ranks // size, chosen)
        for size in sizes
        for chosen in _spread_experts(experts, size, least_spread, replicates=replicates)
    ]


def _spread_experts(experts: int, ranks: int, least_spread: int, *, replicates: bool) -> list[Arguments]:
    """Arguments of an engine of `ranks` ranks that are worth trying: attention of all ranks, whose experts are spread from
    `least_spread` ranks on, and, if SGLang `replicates` attention, data parallel one of shares of it, each within a node."""
    spread = {"ep_size": ranks} if experts % ranks == 0 else {}
    tried = [{} if ranks < least_spread else spread] if ranks <= LARGEST_ENGINE or not replicates else []
    if ranks >= GPUS_PER_NODE and spread and replicates:
        shares = [ranks // tp for tp in powers(GPUS_PER_NODE) if tp < ranks <= tp * MOST_SHARES]
        tried += [spread | {"dp_size": share, "enable_dp_attention": True} for share in shares]
    return [tuple(arguments.items()) for arguments in tried]


def splits(config: AnyConfig, gpus: int) -> list[tuple[int, int]]:
    """(ranks of each trained role, GPUs of the engines). On separate GPUs each role has a power of two, or what it has now."""
    if config.resources.placement == "colocated" or not config.engine_places:
        return [(gpus, gpus)]
    roles = max(1, len([name for name in config.layouts if name in type(config).model_fields]))
    configured = config.policy.layout.world_size
    sizes = sorted({configured, *powers(gpus)})
    return [(size, gpus - roles * size) for size in sizes if gpus // GPUS_PER_NODE <= roles * size < gpus]


def powers(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def _expert_sizes(shape: ModelShape, tp: int, per_stage: int) -> list[tuple[int, int]]:
    if not shape.experts:
        return [(1, 1)]
    fit = [ep for ep in divisors(shape.experts) if per_stage % ep == 0 and ep in powers(LARGEST_EP)]
    return [(ep, 1) for ep in fit if ep > 1] + [(1, tp)]
