"""The lines of `megarl plan` on keys and values in main memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megarl.options.host_cache.section import host_cache_gb_of
from megarl.planning.gpus import GPUS_PER_NODE
from megarl.planning.plan import CapacityPlan


@dataclass(frozen=True)
class HostCachePlan:
    """Main memory for keys and values. `rank_bytes`: of a rank, with room for `tokens`; on its GPU there is room for
    `gpu_tokens`, and a step has `wanted_tokens` under way at once. `node_bytes`: of all engines' ranks on a node; `main_bytes`:
    with what else the plan keeps there. `back_s`: to copy a prompt of mean length back.
    """

    rank_bytes: float
    tokens: int
    gpu_tokens: int
    wanted_tokens: int
    node_bytes: float
    main_bytes: float
    back_s: float


def host_cache_plan(plan: CapacityPlan) -> HostCachePlan | None:
    """Plan the cache in main memory; None of a run without it."""
    engines, sampling = plan.run.engines, plan.run.config.sampling
    size = host_cache_gb_of(sampling) if sampling is not None else 0
    if not size or engines is None:
        return None
    prompt, of_token = plan.lengths.prompt, engines.kv_bytes_per_token
    on_node = min(GPUS_PER_NODE, len(plan.run.places["engine"]))
    return HostCachePlan(
        size * 1e9,
        math.floor(size * 1e9 / of_token),
        plan.memory.kv_tokens,
        plan.memory.kv_wanted,
        on_node * size * 1e9,
        on_node * size * 1e9 + plan.memory.host_bytes_of_a_node,
        prompt * of_token / (plan.gpu.host_gb_per_s * 1e9),
    )


def times_as_json(plan: CapacityPlan) -> dict[str, Any]:
    """Figures that stand beside the phases of a step."""
    cache = host_cache_plan(plan)
    return {} if cache is None else {"host_cache": asdict(cache)}


def stated(plan: CapacityPlan) -> list[str]:
    """Say what the cache holds and takes; nothing of a run without it."""
    cache = host_cache_plan(plan)
    if cache is None:
        return []
    of_rank, of_node = (f"{size / 1e9:,.0f} GB" for size in (cache.rank_bytes, cache.node_bytes))
    lines = [
        f"Behind {cache.gpu_tokens:,} tokens on its GPU a rank of an engine keeps {cache.tokens:,} in {of_rank} of main memory "
        f"({of_node} of a node); a prompt comes back in {cache.back_s * 1e3:,.3g} ms"
    ]
    if cache.tokens < cache.gpu_tokens:
        lines.append("Warning: that is less than on the GPU, so what leaves the GPU's cache has mostly left main memory, too")
    if plan.gpu.node_memory_gb is None:
        lines.append(
            f"With it a node keeps {cache.main_bytes / 1e9:,.0f} GB in main memory; node_memory_gb of --gpu says what it has"
        )
    return lines


def node_refusal(plan: CapacityPlan) -> str | None:
    """The sentence by which a plan is refused whose nodes do not hold the cache; None of any other."""
    cache, has = host_cache_plan(plan), plan.gpu.node_memory_gb
    if cache is None or has is None or cache.main_bytes <= has * 1e9:
        return None
    rest = has - (cache.main_bytes - cache.node_bytes) / 1e9
    ranks = round(cache.node_bytes / cache.rank_bytes)
    most = max(0, math.floor(rest / ranks))
    size, whole = cache.rank_bytes / 1e9, cache.main_bytes / 1e9
    return (
        f"rollout.host_cache_gb is {size:,.0f}, with which a node would hold {whole:,.0f} GB in main memory, but "
        f"node_memory_gb of {plan.gpu.name} is {has:,g}; it must be at most {most}"
    )
