"""What calling every rank of a group costs the driver: rank by rank, and by an actor for each node of eight ranks.

    python benchmarks/group_calls.py --out benchmarks/results/group_calls.json

One asynchronous Ray actor stands for all of them: it answers each call at a time of its own, so that answers trickle in as
they do from ranks. Seconds are of CPU of the driver's process, Ray's threads included: `submit_s` for the calls, `wait_s` for
the answers, which `results_of` waits for. By node an answer is a list of eight. `step_s` is for as many calls as a synchronous
step on shared GPUs makes of all ranks. `behind_s` is how long the wait went on behind the last answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shlex
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

CALLS_OF_A_STEP = 7
RANKS_OF_NODE = 8
ANSWERS = (64, 256, 1024, 4096)
TRICKLE_S = 1 / 2000
"""Between two answers."""


class Everybody:
    """Answers for all ranks, or all nodes."""

    async def call(self, number: int, together: int) -> Any:
        """As the `number`-th, with the answers of so many ranks."""
        await asyncio.sleep(0.5 + number * together * TRICKLE_S)
        return [{"loss": 0.5}] * together, time.time()


def seconds(actor: Any, ranks: int, together: int, rounds: int) -> dict[str, float]:
    """CPU seconds of one call of so many ranks, `together` of which answer at once."""
    from megarl.workers.ray_answers import results_of

    found: dict[str, list[float]] = {"submit_s": [], "wait_s": [], "behind_s": []}
    for _ in range(rounds):
        marks = [time.process_time()]
        references = [actor.call.remote(number, together) for number in range(ranks // together)]
        marks.append(time.process_time())
        answers = results_of(references, 300)
        found["behind_s"].append(time.time() - max(at for _, at in answers))
        marks.append(time.process_time())
        assert sum(len(of_node) for of_node, _ in answers) == ranks
        found["submit_s"].append(marks[1] - marks[0])
        found["wait_s"].append(marks[2] - marks[1])
    medians = {name: statistics.median(taken) for name, taken in found.items()}
    return medians | {"step_s": CALLS_OF_A_STEP * (medians["submit_s"] + medians["wait_s"])}


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(ANSWERS), help="numbers of ranks")
    parser.add_argument(
        "--by-node", type=int, nargs="+", default=[*ANSWERS[1:], 10_240], help="numbers of ranks, called by node"
    )
    parser.add_argument("--rounds", type=int, default=3, help="calls of each, of which the median is told (default: 3)")
    arguments = parser.parse_args()
    import ray
    from measured_code import code_of
    from workload import machine

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=256 * 2**20, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's processes cannot import this file
    actor = ray.remote(num_cpus=0, max_concurrency=20_000)(Everybody).remote()
    ray.get(actor.call.remote(0, 1))
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "code": code_of("group_calls"),
        "versions": {"python": platform.python_version(), "ray": version("ray")},
        "calls_of_a_step": CALLS_OF_A_STEP,
        "ranks_of_node": RANKS_OF_NODE,
        "by_rank": {},
        "by_node": {},
    }
    for kind, together, sizes in (("by_rank", 1, arguments.ranks), ("by_node", RANKS_OF_NODE, arguments.by_node)):
        for ranks in sizes:
            report[kind][str(ranks)] = found = seconds(actor, ranks, together, arguments.rounds)
            print(f"{kind} {ranks:>6} ranks: { ({name: round(value, 4) for name, value in found.items()}) }", flush=True)
    ray.shutdown()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
