"""What `megarl plan` says of the ready plans in examples/plans: step, tokens per second, memory by turn, and what bounds each.

python benchmarks/ready_plans.py [--page docs/evidence/plans.md]
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from planner import TABLE, put_into

from megarl.config import load_any
from megarl.planning.gpus import gpu_named
from megarl.planning.measured import STEP, Measured, read_table
from megarl.planning.plan import make_plan
from megarl.planning.roles import RunShape

ROOT = Path(__file__).parents[1]
PLANS = ROOT / "examples/plans"


def line(path: Path, published: list[Measured]) -> str:
    """A plan's row."""
    kind = re.search(r"x([a-z]+\d+)", path.stem)
    assert kind is not None, f"{path} has no kind of GPU in its name"
    config = load_any(path, [])
    plan = make_plan(config, gpu_named(kind[1]))
    times, worst = plan.times, plan.memory.worst
    longest = max(times.phases, key=lambda phase: phase.seconds)
    turns = ", ".join(f"{turn} {sum(parts.values()) / 1e9:.0f}" for turn, parts in worst.turns.items())
    speed = times.tokens / times.step_seconds / plan.run.gpus
    near = [row for row in published if STEP in row.phases and row.config.model.path == config.model.path]
    near = [row for row in near if row.config.sampling is not None] if config.sampling is not None else near
    figures = ", ".join(f"[{_tokens_per_s(row):,.0f}]({row.url}) on {_gpus(row)}" for row in near if row.gpu == kind[1])
    cells = [_layout(plan.run), f"{times.step_seconds:,.0f}", f"{speed:,.0f}", turns]
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


def main() -> None:
    """Print the table, and put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page")
    arguments = parser.parse_args()
    published = read_table(TABLE)
    header = (
        "plan",
        "layout",
        "s of a step",
        "tokens/s of each GPU",
        "GB by turn",
        "bound by",
        "published tokens/s of each GPU",
    )
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for path in sorted(PLANS.glob("*.yaml")):
        lines.append(line(path, published))
        print(lines[-1], flush=True)
    if arguments.page:
        put_into(Path(arguments.page), "ready", "\n".join(lines))


if __name__ == "__main__":
    main()
