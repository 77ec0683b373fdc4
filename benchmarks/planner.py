"""`megarl plan` against steps that others measured on GPUs (benchmarks/published): predicted, measured, ratio, by phase.

    python benchmarks/planner.py [--leave-one-out] [--page docs/evidence/plans.md] [--json FILE]
    python benchmarks/planner.py --ready [--page docs/evidence/plans.md]

`--ready`: of the ready plans in examples/plans, step, tokens per second, memory by turn, and what bounds each; and of the
seconds in which models answer and the policy is trained, the share in which GPUs wait for links.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path

from pages import put_into

from megarl.config import load_any
from megarl.planning.efficiencies import Efficiencies
from megarl.planning.gpus import GpuSpec, gpu_named
from megarl.planning.measured import STEP, Compared, Measured, compare, fit_constants, held_bytes, read_table
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.roles import RunShape

TABLE = Path(__file__).with_name("published") / "measurements.json"
PLANS = Path(__file__).parents[1] / "examples/plans"
NAMES = ("products", "fp8", "experts", "unequal", "decoding", "decoding_step_s", "expert_layer_s", "tensor_s", "turn_gb_per_s")
"""Constants that were fitted to the rows that are marked so."""


READY = (
    "plan", "layout", "s of a step", "tokens/s of each GPU", "GB by turn", "bound by", "published tokens/s of each GPU",
)  # fmt: skip
"""Columns of the table of ready plans."""

LINKS = {
    "tensor parallel": "tp", "expert parallel": "ep", "context parallel": "cp", "pipeline": "pp",
    "pipeline bubble": "bubble of pp", "data parallel": "gradients and weights of dp", "launches": "launches",
}  # fmt: skip
"""By part of a phase, its column in the table of what is waited for."""


def compared(row: Measured, constants: Efficiencies | None = None) -> list[Compared]:
    """The row's phases, planned with other constants if they are given."""
    return compare(row.plan(spec(row, constants)), row)


def spec(row: Measured, constants: Efficiencies | None = None) -> GpuSpec:
    """The row's kind of GPU."""
    gpu = gpu_named(row.gpu or "h100")
    return replace(gpu, efficiencies=constants) if constants is not None else gpu


def left_out(rows: Sequence[Measured], row: Measured) -> list[Compared]:
    """The phases of `row`, planned with constants that are fitted to all other rows that the defaults were fitted to.

    The fit begins where every share is 0.5, so that it knows nothing of the defaults; what no row tells stays there.
    """
    if not row.phases:
        return []
    others = [other for other in rows if other.fitted and other.name != row.name and other.phases]
    start = replace(Efficiencies(), products=0.5, fp8=0.5, experts=0.5, unequal=0.8, decoding=0.5, decoding_step_s=4e-3)
    start = replace(start, expert_layer_s=2e-3, tensor_s=2e-4, turn_gb_per_s=8.0)
    return compared(row, fit_constants(others, replace(gpu_named("h100"), efficiencies=start), NAMES))


def lines(rows: Sequence[Measured], *, leave_one_out: bool) -> list[str]:
    """The table in Markdown."""
    columns = [*("generate", "update", "log_probs", "sync"), STEP, *(["step, left out"] if leave_one_out else []), "memory"]
    out = [f"| run | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    again: list[list[Compared]] = [[] for _ in rows]
    if leave_one_out:
        with ProcessPoolExecutor(2) as pool:
            again = list(pool.map(left_out, [rows] * len(rows), rows))
    for row, others in zip(rows, again, strict=True):
        found = {one.phase: one for one in compared(row)}
        cells = [_cell(found.get(name)) for name in columns[:5]]
        if leave_one_out:
            by_phase = {one.phase: one for one in others}
            one = by_phase.get(STEP) or by_phase.get("sync")
            cells.append(f"{one.ratio:.2f}" if one else "")
        plan = row.plan(spec(row))
        held = held_bytes(plan, row) / 1e9
        peak = (row.memory or {}).get("peak_gb")
        verdict = "fits" if held * 1e9 <= plan.memory.usable else "does not fit"
        cells.append(f"{held:.1f} / {peak} = {held / peak:.2f}" if peak else f"{held:.1f} GB, {verdict}")
        out.append(f"| [{row.name}]({row.url}) | {' | '.join(cells)} |")
    return out


def _cell(one: Compared | None) -> str:
    return f"{one.predicted:.3g} / {one.measured:.3g} = {one.ratio:.2f}" if one else ""


def summary(rows: Sequence[Measured]) -> str:
    """Root mean square of the logarithms of the ratios of whole steps."""
    errors = [log(one.ratio) for row in rows for one in compared(row) if one.phase == STEP]
    return f"{len(errors)} steps, typical factor {exp(sqrt(sum(e * e for e in errors) / len(errors))):.2f}"


def kind_of(path: Path) -> str:
    """The kind of GPU in the name of a ready plan."""
    kind = re.search(r"x([a-z]+\d+)", path.stem)
    assert kind is not None, f"{path} has no kind of GPU in its name"
    return kind[1]


def waits(path: Path, plan: CapacityPlan) -> str:
    """The row of a ready plan in the table of what is waited for: shares of the seconds of scoring and training."""
    phases = [phase for phase in plan.times.phases if phase.name in ("log_probs", "update")]
    seconds = sum(phase.seconds for phase in phases)
    shares = [sum(phase.parts.get(part, 0.0) for phase in phases) / seconds for part in LINKS]
    cells = [f"{share:.1%}" if share else "" for share in shares]
    return f"| `{path.stem}` | {seconds / plan.times.step_seconds:.0%} | {' | '.join(cells)} |"


def ready(path: Path, plan: CapacityPlan, published: list[Measured]) -> str:
    """The row of a ready plan."""
    config, times, worst = plan.run.config, plan.times, plan.memory.worst
    longest = max(times.phases, key=lambda phase: phase.seconds)
    turns = ", ".join(f"{turn} {sum(parts.values()) / 1e9:.0f}" for turn, parts in worst.turns.items())
    speed = times.tokens / times.step_seconds / plan.run.gpus
    near = [row for row in published if STEP in row.phases and row.config.model.path == config.model.path]
    near = [row for row in near if row.config.sampling is not None] if config.sampling is not None else near
    figures = ", ".join(f"[{_tokens_per_s(row):,.0f}]({row.url}) on {_gpus(row)}" for row in near if row.gpu == kind_of(path))
    refused = ", which a run refuses" if plan.engine_refusal is not None else ""
    cells = [_layout(plan.run) + refused, f"{times.step_seconds:,.0f}", f"{speed:,.0f}", turns]
    cells += [f"{longest.name}: {longest.bound}", figures]
    return f"| `{path.stem}` | {' | '.join(cells)} |"


def _layout(run: RunShape) -> str:
    layout = run.config.policy.layout
    sizes = {name: getattr(layout, name) or 1 for name in ("tp", "pp", "vpp", "cp", "ep", "dp")}
    engines = f"; engines of {run.engines.target.ranks}" if run.engines is not None else ""
    text = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    return f"{text}, recompute {run.config.model.recompute}{engines}"


def _gpus(row: Measured) -> int:
    return row.plan(gpu_named(row.gpu or "h100")).run.gpus


def _tokens_per_s(row: Measured) -> float:
    tokens = row.config.sequences_per_step * (row.prompt_tokens + row.response_tokens)
    return tokens / row.phases[STEP] / _gpus(row)


def ready_tables(published: list[Measured]) -> dict[str, str]:
    """The tables of ready plans in Markdown, by their marks."""
    plans = {path: make_plan(load_any(path, []), gpu_named(kind_of(path))) for path in sorted(PLANS.glob("*.yaml"))}
    columns = {"ready": READY, "waits": ("plan", "of the step", *LINKS.values())}
    rows = {
        "ready": [ready(path, plan, published) for path, plan in plans.items()],
        "waits": [waits(path, plan) for path, plan in plans.items()],
    }
    return {
        name: "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows[name]]) for name, heads in columns.items()
    }


def report(rows: list[Measured], *, leave_one_out: bool) -> str:
    """The table of the rows that constants were fitted to, and of those kept apart, in Markdown."""
    fitted = [row for row in rows if row.fitted or not row.phases]
    apart = [row for row in rows if row not in fitted]
    parts = [*lines(fitted, leave_one_out=leave_one_out), "", f"{summary(fitted)}.", ""]
    parts += ["Kept apart, no constant is fitted to these:", "", *lines(apart, leave_one_out=False), "", f"{summary(apart)}."]
    return "\n".join(parts)


def main() -> None:
    """Print a table, and put it into a page and its figures into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ready", action="store_true", help="the table of the ready plans")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = read_table(TABLE)
    tables = ready_tables(rows) if arguments.ready else {"published": report(rows, leave_one_out=arguments.leave_one_out)}
    print(*tables.values(), sep="\n\n")
    if arguments.page:
        for name, text in tables.items():
            put_into(arguments.page, name, text)
    if arguments.json:
        found = {row.name: {one.phase: one.ratio for one in compared(row)} for row in rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
