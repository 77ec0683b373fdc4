"""Choices that a search tries: layouts for training, how their passes are computed, and sizes of engines, as overrides
of a config."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megarl.config import AnyConfig
from megarl.config.engine_kinds import capabilities_of
from megarl.config.layout import Layout, divisors
from megarl.models.shape import ModelShape
from megarl.planning.gpus import GPUS_PER_NODE

LARGEST_PP, LARGEST_CP, LARGEST_EP, LARGEST_ENGINE = 64, 8, 64, 2 * GPUS_PER_NODE
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


@dataclass(frozen=True)
class Choice:
    """One thing to try. `layout` is every trained role's, `max_tokens` their micro-batches', and there are `engines` of
    `engine_tp` ranks (0: the config's own)."""

    layout: Layout
    recompute: str
    max_tokens: int
    engine_tp: int
    engines: int

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
        return changes

    def overrides(self, config: AnyConfig) -> tuple[str, ...]:
        """The same as `megarl` takes them on a command line, quoted for a shell; none: it is the config itself."""
        return tuple(f"{field}={_flow(value)}" for field, value in self.changes(config).items())


def _flow(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    inner = ", ".join(f"{name}: {str(size).lower()}" for name, size in value.items())
    return shlex.quote(f"{{{inner}}}")


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


def engine_sizes(config: AnyConfig, ranks: int) -> list[tuple[int, int]]:
    """(ranks of an engine, engines) on `ranks` GPUs; (0, 0) alone: they stay as they are, or there are none."""
    sampling = config.sampling
    if sampling is None or capabilities_of(sampling).in_process:
        return [(0, 0)]
    is_bound = any(name.endswith(OF_THE_ENGINES_SIZE) for name in sampling.engine_args)
    sizes = [sampling.tp] if is_bound else powers(LARGEST_ENGINE)
    return [(tp, ranks // tp) for tp in sizes if tp <= ranks and (ranks % tp == 0 or is_bound)]


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
