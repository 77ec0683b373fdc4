"""The findings of a search as lines for a terminal, whose overrides can be pasted, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from megarl.planning.plan import CapacityPlan
from megarl.planning.search import Found, Ranked, gains, stated

EXPLAINED = 3
"""Number of the best layouts that are compared with the config's own by phase."""
KV_CACHE = ("engine", "KV cache")


def found_tables(found: Found) -> list[Table | str]:
    """The layouts that fit, fastest first, why the best are faster, and why others were refused."""
    lines: list[Table | str] = [
        f"{found.fitting:,} of {found.tried:,} layouts fit; seconds are estimates, with weight updates",
        f"{'place':>5}  {'s of a step':>11}  {'GB without KV':>13}  {'KV tokens':>10}  what to set",
    ]
    for place, entry in enumerate(found.best, 1):
        changes = " ".join(entry.overrides) or "nothing: this is the config itself"
        lines.append(f"{place:>5}  {_figures(entry)}  {changes}")
    lines += ["", f"yours: {_own(found)}", ""]
    for place, entry in enumerate(found.best[:EXPLAINED], 1):
        lines += [f"{place}: {explained(entry, found.own)}"]
    refused = Table("refused", "why", "such as", box=None, pad_edge=False)
    for why, count in sorted(found.refused.counts.items(), key=lambda item: -item[1]):
        refused.add_row(f"{count:,}", why, found.refused.examples[why])
    return [*lines, "", refused] if found.refused.counts else lines


def found_tree(found: Found) -> dict[str, Any]:
    """The same for JSON."""
    best = [
        {
            "place": place,
            "overrides": list(entry.overrides),
            "layout": stated(entry.choice.layout),
            **_sizes(entry.plan),
            "step_s": entry.step_seconds,
        }
        for place, entry in enumerate(found.best, 1)
    ]
    for entry, line in zip(found.best[:EXPLAINED], best, strict=False):
        line["gains"] = {
            name: {"own_s": before, "s": after, "parts": dict(parts)} for name, before, after, parts in gains(entry, found.own)
        }
    own = {
        "fits": found.own.plan.fits,
        "place": found.place or None,
        **_sizes(found.own.plan),
        "step_s": found.own.step_seconds,
    }
    refused = [
        {"count": count, "why": why, "such_as": found.refused.examples[why]} for why, count in found.refused.counts.items()
    ]
    return {"tried": found.tried, "fitting": found.fitting, "best": best, "own": own, "refused": refused}


def explained(entry: Ranked, own: Ranked) -> str:
    """Explain where a layout gains and loses against the config's own."""
    whole = f"{stated(entry.choice.layout)}: {entry.step_seconds:,.4g} s, where yours takes {own.step_seconds:,.4g} s"
    said = []
    for name, before, after, parts in gains(entry, own):
        why = ", ".join(f"{part} {seconds:+,.3g}" for part, seconds in parts)
        said.append(f"{name} {before:,.3g} -> {after:,.3g} s" + (f" ({why})" if why else ""))
    return f"{whole}; {'; '.join(said)}" if said else whole


def _figures(entry: Ranked) -> str:
    sizes = _sizes(entry.plan)
    without, tokens = sizes["bytes_without_kv_cache"] / 1e9, sizes["kv_cache_tokens"]
    return f"{entry.step_seconds:>11,.4g}  {without:>13,.1f}  {tokens:>10,}"


def _sizes(plan: CapacityPlan) -> dict[str, Any]:
    """Bytes of the fullest GPU, and what it would hold if the cache were empty."""
    turns = (parts for gpu in plan.memory.gpus for parts in gpu.turns.values())
    without = max(sum(size for name, size in parts.items() if name != KV_CACHE) for parts in turns)
    return {"bytes": plan.memory.worst.total, "bytes_without_kv_cache": without, "kv_cache_tokens": plan.memory.kv_tokens}


def _own(found: Found) -> str:
    own = f"{found.own.step_seconds:,.4g} s"
    if not found.place:
        return f"{own}, but it does not fit: {found.own.plan.excess}"
    gpus = "" if found.own.plan.run.gpus == found.own.plan.available else f" on {found.own.plan.run.gpus:,} GPUs"
    return f"{own}{gpus}, place {found.place:,} ({found.fitting:,} layouts fit)"
