"""A plan, and what a search found, as tables for a terminal and as JSON. Overrides of a search can be pasted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from megarl.option_list import functions
from megarl.planning.measured import Measured, compare
from megarl.planning.memory import MOMENTARY, STATIC
from megarl.planning.plan import CapacityPlan
from megarl.planning.search import Found, Ranked, gains, stated
from megarl.planning.turns import STATED

EXPLAINED = 3
"""Number of the best layouts that are compared with the config's own by phase."""
ALIKE = 0.02
"""Seconds of a step that differ by less are as good as equal: plans are not closer to runs (docs/evidence/plans.md)."""
TIGHT = 0.05
"""Share of a GPU's usable memory: a layout that leaves less free is marked, as planned activations are a few per cent off."""
KV_CACHE = ("engine", "KV cache")
PARTS = (*STATIC, "adapters", "KV cache", *MOMENTARY, "working", "staging", "asleep", "contexts")


def plan_tables(plan: CapacityPlan, model: str) -> list[Table | str]:
    """What the run is, the fullest GPU by owner and part, and the phases of a step."""
    return [_facts(plan, model), "", *_refusal(plan), *_memory(plan), "", *_times(plan)]


def against_tables(plan: CapacityPlan, measured: Measured) -> list[Table | str]:
    """Every measured phase beside what the plan says."""
    table = Table("phase", box=None, pad_edge=False)
    for column in ("predicted", "measured", "ratio"):
        table.add_column(column, justify="right")
    for row in compare(plan, measured):
        table.add_row(row.phase, f"{row.predicted:,.3g}", f"{row.measured:,.3g}", f"{row.ratio:.2f}")
    source = f" ({measured.source})" if measured.source else ""
    return [f"Seconds against those of {measured.name}{source}; a ratio below 1 is a plan that is too fast", table]


def as_json(plan: CapacityPlan, search: Mapping[str, Any] | None = None, measured: Measured | None = None) -> str:
    """The same in full, with what a `search` found and what was `measured`."""
    worst, times, pictures = plan.memory.worst, plan.times, plan.lengths.pictures
    tree: dict[str, Any] = {
        "gpu": plan.gpu.name,
        "gpus": plan.run.gpus,
        "available": plan.available,
        "fits": plan.fits,
        "engine_refusal": plan.engine_refusal,
        "calibration": plan.calibration.source,
        "lengths": {"prompt": plan.lengths.prompt, "response": plan.lengths.response, "longest": plan.lengths.longest},
        "pictures": {
            "source": pictures.source,
            "per_prompt": pictures.per_prompt,
            "patches": pictures.patches,
            "most_patches": pictures.most_patches,
        },
        "memory": {
            "usable_bytes": plan.memory.usable,
            "fullest_gpu": worst.first,
            "bytes": worst.total,
            "parts": {f"{owner}/{part}": size for (owner, part), size in worst.parts.items()},
            "fullest_turn": worst.fullest,
            "turns": {
                turn: {f"{owner}/{part}": size for (owner, part), size in parts.items()} for turn, parts in worst.turns.items()
            },
            "host_bytes_of_a_node": plan.memory.host_bytes_of_a_node,
            "kv_cache_tokens": plan.memory.kv_tokens,
            "kv_cache_tokens_wanted": plan.memory.kv_wanted,
            "towers": plan.towers,
        },
        "times": {
            "step_s": times.step_seconds,
            "phases": {phase.name: {"seconds": phase.seconds, "parts": dict(phase.parts)} for phase in times.phases},
        },
    }
    for more in functions("times", "times_as_json"):
        tree["times"] |= more(plan)
    if measured is not None:
        tree["against"] = {
            "name": measured.name,
            "source": measured.source,
            "phases": {
                row.phase: {"predicted_s": row.predicted, "measured_s": row.measured, "ratio": row.ratio}
                for row in compare(plan, measured)
            },
        }
    if search is not None:
        tree["search"] = search
    return json.dumps(tree, indent=2)


def _refusal(plan: CapacityPlan) -> list[str]:
    """The line on engines that a run would not start."""
    if (why := plan.engine_refusal) is None:
        return []
    return [f"The engines are planned, but a run refuses them: SGLang was not seen with this model; {why}", ""]


def _facts(plan: CapacityPlan, model: str) -> Table:
    run, memory, lengths = plan.run, plan.memory, plan.lengths
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("model", model)
    for role in run.roles:
        sizes = {name: getattr(role.layout, name) or 1 for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
        layout = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "no parallelism"
        trained = "trained" if role.trained is not None else "frozen"
        if role.shape.lora is not None:
            trained = f"adapters of rank {role.shape.lora.rank} trained ({role.adapters / 1e6:,.1f}M parameters)"
        elif role.shares_weights:
            trained = "the policy without what its adapters learn"
        where = f"in the processes of {role.group}"
        ranks = f"{role.layout.world_size:,} rank{'s' * (role.layout.world_size > 1)}"
        table.add_row(role.name, f"{trained}, {ranks} ({layout}), {where}")
    if run.engines is not None:
        target = run.engines.target
        cache = f"KV cache of {memory.kv_tokens:,} tokens a rank ({memory.kv_wanted:,} would be filled at once)"
        table.add_row("engines", f"{target.engines:,} of {target.ranks} ranks, {cache}")
        if run.lent is not None:
            table.add_row("lent engines", f"{run.lent.target.engines:,} of {target.ranks} ranks, on the trainer's GPUs")
    shared = "on the same GPUs, in turns" if len(memory.worst.turns) > 1 else "on the same GPUs"
    sharing = shared if run.colocated else "each on GPUs of its own"
    table.add_row("GPUs", f"{run.gpus:,} of {plan.available:,} {plan.gpu.name}, {sharing}")
    for label, value in run.config.batch_rows():
        table.add_row(label, value)
    responses = f"responses of {lengths.response:,.0f}, at most {lengths.longest:,}"
    table.add_row("lengths", f"prompts of {lengths.prompt:,.0f} tokens on average, {responses}")
    if plan.towers:
        table.add_row("pictures", _pictures(plan))
    for name, parts in plan.towers.items():
        stated = ", ".join(f"{part} {size / 1e9:,.2f}" for part, size in parts.items() if size)
        table.add_row(f"tower of {name}", f"GB on each rank of the first stage: {stated}")
    return table


def _pictures(plan: CapacityPlan) -> str:
    """What was assumed, in patches and tokens too."""
    pictures, vision = plan.lengths.pictures, plan.run.roles[0].shape.vision
    if vision is None or not pictures.most:
        return "none"
    tokens, most = (patches / vision.merge**2 for patches in (pictures.patches, pictures.most_patches))
    return f"{pictures.source}; a prompt has {tokens:,.0f} tokens of them on average, at most {most:,.0f}"


def _memory(plan: CapacityPlan) -> list[Table | str]:
    worst, memory, most = plan.memory.worst, plan.memory, plan.memory.worst.most
    owners = list(dict.fromkeys(owner for owner, _ in most))
    in_turns = len(worst.turns) > 1
    table = Table("GB of the fullest GPU", box=None, pad_edge=False)
    for owner in owners:
        table.add_column(owner, justify="right")
    if in_turns:
        table.add_column("sum", justify="right")
    for part in PARTS:
        sizes = [most.get((owner, part)) for owner in owners]
        if any(sizes):
            table.add_row(part, *("" if size is None else f"{size / 1e9:,.2f}" for size in sizes))
    if in_turns:
        table.add_section()
    for turn, parts in worst.turns.items():
        sums = [sum(size for (part_owner, _), size in parts.items() if part_owner == owner) for owner in owners]
        cells = [f"{size / 1e9:,.2f}" if size else "" for size in sums]
        table.add_row(*([turn, *cells, f"{sum(sums) / 1e9:,.2f}"] if in_turns else ["sum", *cells]))
    verdict = "fits" if memory.fits else "does not fit"
    of_all = f"{worst.total / 1e9:,.1f} of {memory.usable / 1e9:,.1f} GB{STATED[worst.fullest]}"
    stated = f"GPU {worst.first} (one of {worst.count:,} alike): {of_all}, {verdict}"
    if memory.host_bytes_of_a_node:
        stated += f"; main memory of a node: {memory.host_bytes_of_a_node / 1e9:,.0f} GB"
    return [table, stated]


def _times(plan: CapacityPlan) -> list[Table | str]:
    times = plan.times
    table = Table("phase", box=None, pad_edge=False)
    of_towers = any(phase.parts.get("tower") for phase in times.phases)
    for column in ("seconds", "share", *(["tower"] if of_towers else [])):
        table.add_column(column, justify="right")
    table.add_column("bound by")
    for phase in times.phases:
        if phase.seconds:
            bound = f"{phase.bound} ({phase.parts[phase.bound] / phase.seconds:.0%})"
            # of generation by the other engines alone, which lent ones shorten, there is no share
            share = f"{phase.seconds / times.step_seconds:.0%}" if phase.seconds <= times.step_seconds else ""
            cells = [f"{phase.seconds:,.3g}", share]
            tower = phase.parts.get("tower", 0.0)
            cells += [f"{tower:,.3g}" if tower else ""] if of_towers else []
            table.add_row(phase.name, *cells, bound)
    step, rate = times.step_seconds, times.tokens / times.step_seconds / plan.run.gpus
    table.add_row("step", f"{step:,.3g}", "", *([""] if of_towers else []), f"{rate:,.0f} tokens/s of each GPU")
    more = [line for stated in functions("times", "stated") for line in stated(plan)]
    return [table, *more, f"Seconds are estimates, by {plan.calibration.source}"]


def found_tables(found: Found) -> list[Table | str]:
    """The layouts that fit, fastest first, why the best are faster, and why others were refused."""
    gpus, usable = found.own.plan.available, found.own.plan.memory.usable
    if found.best:
        gpus = found.best[0].plan.available
    lines: list[Table | str] = [
        f"{found.fitting:,} of {found.tried:,} layouts fit on {gpus:,} GPUs; seconds are estimates, with weight updates",
    ]
    if found.best:
        lines.append(
            f"{'place':>5}  {'seconds':>9}  {'GB of ' + f'{usable / 1e9:,.1f}':>12}  {'without KV':>10}  {'KV tokens':>10}"
        )
    for place, entry in enumerate(found.best, 1):
        changes = " ".join(entry.overrides) or "nothing: this is the config itself"
        lines += [f"{place:>5}  {_search_figures(entry)}", f"       {changes}"]
    if (hint := _which_to_take(found)) is not None:
        lines += ["", hint]
    if found.place:
        lines += ["", f"yours: {_own_place(found)}", ""]
        lines += [f"{place}: {explained(entry, found.own)}" for place, entry in enumerate(found.best[:EXPLAINED], 1)]
    else:
        lines += ["", f"yours does not fit: {found.own.plan.excess}"]
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
            **_cache_sizes(entry.plan),
            "step_s": entry.step_seconds,
        }
        for place, entry in enumerate(found.best, 1)
    ]
    for entry, line in zip(found.best[:EXPLAINED], best, strict=False):
        line["gains"] = {
            name: {"own_s": before, "s": after, "parts": dict(parts)} for name, before, after, parts in gains(entry, found.own)
        }
    current = {
        "fits": found.own.plan.fits,
        "place": found.place or None,
        **_cache_sizes(found.own.plan),
        "step_s": found.own.step_seconds,
    }
    refused = [
        {"count": count, "why": why, "such_as": found.refused.examples[why]} for why, count in found.refused.counts.items()
    ]
    return {"tried": found.tried, "fitting": found.fitting, "best": best, "own": current, "refused": refused}


def explained(entry: Ranked, own: Ranked) -> str:
    """Explain where a layout gains and loses against the config's own."""
    whole = f"{stated(entry.choice.layout)}: {entry.step_seconds:,.4g} s, where yours takes {own.step_seconds:,.4g} s"
    phrases = []
    for name, before, after, parts in gains(entry, own):
        why = ", ".join(f"{part} {seconds:+,.3g}" for part, seconds in parts)
        phrases.append(f"{name} {before:,.3g} -> {after:,.3g} s" + (f" ({why})" if why else ""))
    return f"{whole}; {'; '.join(phrases)}" if phrases else whole


def _search_figures(entry: Ranked) -> str:
    sizes = _cache_sizes(entry.plan)
    whole, without, tokens = sizes["bytes"] / 1e9, sizes["bytes_without_kv_cache"] / 1e9, sizes["kv_cache_tokens"]
    figures = f"{entry.step_seconds:>9,.4g}  {whole:>12,.1f}  {without:>10,.1f}  {tokens:>10,}"
    return f"{figures}  tight: {_free(entry):.0%} free" if _free(entry) < TIGHT else figures


def _free(entry: Ranked) -> float:
    """Share of the memory that may be planned with, which the fullest GPU has left."""
    return 1 - entry.plan.memory.worst.total / entry.plan.memory.usable


def _which_to_take(found: Found) -> str | None:
    """Advise the roomiest of the layouts that are as fast as the first, as far as an estimate tells."""
    alike = [entry for entry in found.best if entry.step_seconds <= (1 + ALIKE) * found.best[0].step_seconds]
    if len(alike) < 2:
        return None
    place = max(range(len(alike)), key=lambda at: round(_free(alike[at]), 2))
    return (
        f"1 to {len(alike)} differ by at most {ALIKE:.0%}, less than estimates are exact to: take {place + 1}, which leaves "
        f"the most memory free ({_free(alike[place]):.0%})"
    )


def _cache_sizes(plan: CapacityPlan) -> dict[str, Any]:
    """Bytes of the fullest GPU, and what it would hold if the cache were empty."""
    turns = (parts for gpu in plan.memory.gpus for parts in gpu.turns.values())
    without = max(sum(size for name, size in parts.items() if name != KV_CACHE) for parts in turns)
    return {"bytes": plan.memory.worst.total, "bytes_without_kv_cache": without, "kv_cache_tokens": plan.memory.kv_tokens}


def _own_place(found: Found) -> str:
    step_time = f"{found.own.step_seconds:,.4g} s"
    gpus = "" if found.own.plan.run.gpus == found.own.plan.available else f" on {found.own.plan.run.gpus:,} GPUs"
    return f"{step_time}{gpus}, place {found.place:,} ({found.fitting:,} layouts fit)"
