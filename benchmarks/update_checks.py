"""What checking an update costs the driver: sums for each rank of each engine, and boxes one by one as where sums differ.

    python benchmarks/update_checks.py --out benchmarks/results/update_checks.json

The plan is real, so that every training rank tells of the ranks of engines that it really sends to; checksums are drawn.
Seconds are of CPU, of one process: unpickling what each rank answers (`PushSummary`), adding it up by engine
(`UpdateSummary`) and pickling what each engine is told. Ray's own calls are not in it (`benchmarks/group_calls.py`).
`by_box_s` is what the same takes of one engine's boxes by name, as for an engine that is in doubt, and `by_box_of_all_s` that
times the engines. `rank_s` is what a training rank takes to add up the boxes that it sends, beside their checksums.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from reshard_plan import CASES, MODELS

from megarl.config.layout import Layout
from megarl.models.registry import load_hf_config
from megarl.weights.digests import sums_by_rank
from megarl.weights.merged_pushes import merge
from megarl.weights.plan import ReshardPlan, plan_reshard
from megarl.weights.pusher import Pushed, PushSummary, UpdateSummary
from megarl.weights.rank_plan import RankPlan, SliceKey
from megarl.weights.sglang_targets import EVERY_RANK, EngineTarget

WORLDS = (1024, 10_240)


def plan_of(case: str, world: int) -> ReshardPlan:
    """The plan of a case on so many GPUs, which trainer and engines share."""
    model, sizes, engine = CASES[case]
    layout = Layout(**sizes, dp=world // (sizes["tp"] * sizes["pp"]))
    ranks = engine["tp"] * engine.get("dp", 1)
    return plan_reshard(load_hf_config(MODELS / model), layout, EngineTarget(**engine, engines=max(1, world // ranks)))


def answers(plan: ReshardPlan) -> list[bytes]:
    """What every training rank answers to a push, as it travels."""
    buckets = np.arange(len(plan.bucket_starts) - 1)
    of_rank = plan.bucket_engine_rank - EVERY_RANK
    pairs = []
    for engine in range(plan.target.engines):
        sender = plan.sender(np.array(engine), buckets)
        pairs.append(np.unique(np.column_stack([sender, np.full_like(sender, engine), of_rank]), axis=0))
    sends = np.concatenate(pairs)
    sends = sends[np.argsort(sends[:, 0], kind="stable")]
    drawn = np.random.default_rng(0).integers(0, 2**63, (len(sends), 4)).astype(np.uint64)
    tables = np.column_stack([sends[:, 1:].astype(np.uint64), drawn])
    bounds = np.searchsorted(sends[:, 0], np.arange(plan.layout.world_size + 1))
    return [pickle.dumps(PushSummary(tables[first:stop].copy(), {}, 2**30), protocol=5) for first, stop in pairwise(bounds)]


def driver(told: list[bytes]) -> int:
    """What the driver does of an update's checks; returns the bytes that engines are told."""
    update = UpdateSummary.of([pickle.loads(one) for one in told])
    return sum(len(pickle.dumps(sent, protocol=5)) for sent in update.sent.values())


def boxes_of_one_engine(plan: ReshardPlan) -> list[bytes]:
    """What the ranks that send to the first engine tell of it box by box, as it travels."""
    found = []
    for rank in plan.senders(0):
        boxes = [
            held for engines, some in RankPlan(plan, rank)._loads if 0 in engines for held, *_ in some
        ]  # fmt: skip
        found.append(pickle.dumps({0: Pushed(drawn(boxes))}, protocol=5))
    return found


def drawn(boxes: list[SliceKey]) -> dict[SliceKey, str]:
    """A checksum for each."""
    return {box: f"{hash(box) % 2**128:032x}" for box in boxes}


def cpu_seconds(work: Callable[[], Any], rounds: int) -> float:
    """The median of some rounds, in this process."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def measure(case: str, world: int, rounds: int) -> dict[str, Any]:
    """All figures of a case on so many GPUs."""
    plan = plan_of(case, world)
    told, of_one = answers(plan), boxes_of_one_engine(plan)
    merged = merge([pickle.loads(one) for one in of_one])[0].checksums
    of_one_rank = pickle.loads(of_one[0])[0].checksums

    def by_box() -> None:
        pickle.dumps(merge([pickle.loads(one) for one in of_one])[0].checksums, protocol=5)

    by_box_s = cpu_seconds(by_box, rounds)
    return {
        "engines": plan.target.engines,
        "boxes": len(merged) * plan.target.engines,
        "driver_s": cpu_seconds(lambda: driver(told), rounds),
        "bytes_from_ranks": sum(map(len, told)),
        "bytes_to_engines": driver(told),
        "by_box_s": by_box_s,
        "by_box_of_all_s": by_box_s * plan.target.engines,
        "bytes_by_box_of_all": sum(map(len, of_one)) * plan.target.engines,
        "rank_s": cpu_seconds(lambda: sums_by_rank(of_one_rank), rounds),
        "boxes_of_rank": len(of_one_rank),
    }


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--cases", choices=tuple(CASES), nargs="+", default=list(CASES), help="models (default: all)")
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), help="numbers of GPUs")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median is told (default: 3)")
    arguments = parser.parse_args()
    from measured_code import code_of
    from workload import machine

    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "code": code_of("update_checks"),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "rounds": arguments.rounds,
        "checks": {},
    }
    for case in arguments.cases:
        for world in arguments.worlds:
            report["checks"].setdefault(case, {})[str(world)] = found = measure(case, world, arguments.rounds)
            print(f"{case} {world:>6} GPUs: { ({name: round(value, 4) for name, value in found.items()}) }", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
