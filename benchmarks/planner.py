"""`megarl plan` against steps that others measured on GPUs (benchmarks/published): predicted, measured, ratio, by phase.

python benchmarks/planner.py [--leave-one-out] [--page docs/evidence/plans.md] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path

from megarl.planning.efficiencies import Efficiencies
from megarl.planning.gpus import GpuSpec, gpu_named
from megarl.planning.measured import STEP, Compared, Measured, compare, fit_constants, held_bytes, read_table

TABLE = Path(__file__).with_name("published") / "measurements.json"
NAMES = ("products", "fp8", "experts", "unequal", "decoding", "decoding_step_s", "expert_layer_s", "tensor_s", "turn_gb_per_s")
"""Constants that were fitted to the rows that are marked so."""


def put_into(page: Path, name: str, text: str) -> None:
    """Write `text` between the page's marks of this name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


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


def main() -> None:
    """Print the tables, and put them into a page and a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--page")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows = read_table(TABLE)
    fitted = [row for row in rows if row.fitted or not row.phases]
    apart = [row for row in rows if row not in fitted]
    parts = [*lines(fitted, leave_one_out=arguments.leave_one_out), "", f"{summary(fitted)}.", ""]
    parts += ["Kept apart, no constant is fitted to these:", "", *lines(apart, leave_one_out=False), "", f"{summary(apart)}."]
    text = "\n".join(parts)
    print(text)
    if arguments.page:
        put_into(Path(arguments.page), "published", text)
    if arguments.json:
        found = {row.name: {one.phase: one.ratio for one in compared(row)} for row in rows}
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
