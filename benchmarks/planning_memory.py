"""Planned bytes of a training rank against what a real rank's tensors sum to, for the layouts of tests/planning/test_memory.py
and, with pictures, of tests/planning/test_tower_memory.py.

    python benchmarks/planning_memory.py --out benchmarks/results/planning_memory.json

Real ranks are processes under Gloo. Of every stage the fullest rank is compared. `make docs` writes the table of the figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measured_code import code_of

from tests.planning import test_memory, test_tower_memory
from tests.world import World

PARTS = ("parameters", "gradients", "optimizer", "activations")


def compared(world: World, most_ranks: int) -> list[dict[str, Any]]:
    """Planned and measured bytes by part, of every stage of every case with at most so many ranks."""
    found = []
    cases: list[tuple[Any, Any]] = [*((case, test_memory.measured) for case in test_memory.CASES)]
    cases += [(case, test_tower_memory.measured) for case in test_tower_memory.CASES]
    for case, measured in cases:
        if case.layout.world_size > most_ranks:
            continue
        of_ranks = measured(world, case)
        for stage in range(case.layout.pp):
            ranks = [rank for number, rank in enumerate(of_ranks) if case.layout.coords(number).pp == stage]
            planned = case.planned(stage)
            most = {part: max(rank[part] for rank in ranks) for part in PARTS}
            row = {"case": case.name, "stage": stage, "planned": {part: planned[part] for part in PARTS}, "measured": most}
            found.append(row)
            print(case.name, stage, {part: round(planned[part] / most[part], 3) for part in PARTS}, flush=True)
    return found


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--ranks", type=int, default=4, help="largest layouts that are measured (default: 4 ranks, all)")
    arguments = parser.parse_args()
    with World(arguments.ranks) as world:
        rows = compared(world, arguments.ranks)
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "code": code_of("planning_memory"),
        "versions": {"python": platform.python_version(), "megatron-core": version("megatron-core"), "torch": version("torch")},
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
