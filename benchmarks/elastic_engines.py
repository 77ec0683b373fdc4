"""What a run keeps of its throughput while one of its engines comes and goes, and how soon an engine that comes samples.

    make tiny-model && python benchmarks/elastic_engines.py --out benchmarks/results/elastic_engines.json

examples/recipes/elastic_engines.yaml twice, on a Ray of this machine with a node for each engine: with all engines from the
first step to the last, and with the last one's node coming and going every `--period` seconds, with notice and without in
turns. Engines' decoding steps take a fixed time (paced_engine.py). The throughput is that of an engine: tokens per second,
divided by the mean number of engines that had weights. The time from a node's place to the engine's first request, under the
newest weights, is compared with the engine's own start, which is a part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.measured_code import code_of  # noqa: E402
from benchmarks.workload import publish, versions  # noqa: E402
from megarl.config import Config, load_config  # noqa: E402
from megarl.errors import DeadlineError  # noqa: E402
from megarl.observe.summary import machine  # noqa: E402
from megarl.options.elastic_engines import requests  # noqa: E402
from megarl.options.elastic_engines.members import EngineMembers, Member  # noqa: E402
from megarl.rollout.scheduling.engine_order import EngineOrder  # noqa: E402
from megarl.rollout.scheduling.engine_state import EngineState  # noqa: E402
from megarl.trainers.rl.train import train  # noqa: E402

LOOK_S = 0.05
FIRST = 2
"""Steps left out: what is done for the first time takes longer."""
LEAVE_S = 60.0
"""For an engine to hand over what it works on."""
PACED = f"rollout.engine={ROOT}/benchmarks/paced_engine.py:PacedEngine"


@dataclass
class Coming:
    """An engine that came: when it had a place, how long its own start took, and when it was first asked for samples."""

    began: float
    start_s: float = 0.0
    first_request: float | None = None


@dataclass
class Watch:
    """What the engines of a run do: tokens as they are told, and engines with weights every `LOOK_S` seconds."""

    tokens: list[tuple[float, int]] = field(default_factory=list)
    engines: list[tuple[float, int]] = field(default_factory=list)
    comings: dict[int, list[Coming]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    """When each batch was taken."""
    rollouts: Any = None

    def figures(self) -> dict[str, float]:
        """Tokens per second, the mean number of engines, and their quotient, behind the first steps."""
        begin, end = self.steps[FIRST - 1], self.steps[-1]
        tokens = sum(count for at, count in self.tokens if begin < at <= end)
        engines = mean(count for at, count in self.engines if begin < at <= end)
        per_s = tokens / (end - begin)
        return {"seconds": end - begin, "tokens_per_s": per_s, "engines": engines, "tokens_per_engine_s": per_s / engines}


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Take down what the engines of runs do meanwhile."""
    from megarl.workers.rollouts import Rollouts

    watch, over = Watch(), threading.Event()
    count, take, join, start = EngineState.count_tokens, EngineOrder.take, EngineMembers._join, EngineMembers._start
    next_batch = Rollouts.next_batch

    def count_tokens(state: EngineState, *arguments: Any) -> None:
        before = state.sampled_tokens
        count(state, *arguments)
        watch.tokens.append((time.perf_counter(), state.sampled_tokens - before))

    def take_request(order: EngineOrder, state: EngineState, *arguments: Any) -> Any:
        coming = watch.comings.get(state.number, [None])[-1]
        if coming is not None and coming.first_request is None:
            coming.first_request = time.perf_counter()
        return take(order, state, *arguments)

    def joined(members: EngineMembers, member: Member) -> None:
        watch.comings.setdefault(member.number, []).append(Coming(time.perf_counter()))
        join(members, member)

    def started(members: EngineMembers, member: Member) -> Any:
        began = time.perf_counter()
        version = start(members, member)
        watch.comings[member.number][-1].start_s = time.perf_counter() - began
        return version

    def batch(rollouts: Rollouts, *arguments: Any) -> Any:
        watch.rollouts = rollouts
        taken = next_batch(rollouts, *arguments)
        watch.steps.append(time.perf_counter())
        return taken

    def look() -> None:
        while not over.wait(LOOK_S):
            if watch.rollouts is not None:
                states = watch.rollouts.scheduler.engines
                there = sum(state.version is not None and not state.is_absent for state in states)
                watch.engines.append((time.perf_counter(), there))

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (EngineState, "count_tokens", count_tokens), (EngineOrder, "take", take_request), (EngineMembers, "_join", joined),
        (EngineMembers, "_start", started), (Rollouts, "next_batch", batch),
    ]  # fmt: skip
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    looks = threading.Thread(target=look)
    looks.start()
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield watch
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
        over.set()
        looks.join()


def come_and_go(cluster: Any, config: Config, most: int, period_s: float, over: threading.Event) -> None:
    """Take the last engine's node away and add one, in turns, until the run is over; every second time without notice."""
    notice, folder = True, Path(config.run_folder)
    while not over.wait(period_s):
        file = folder / requests.ENGINES
        told = json.loads(file.read_text())["engines"] if file.exists() else []
        there = [engine["node_id"] for engine in told if engine["stage"] == "there"]
        if len(there) < most:
            continue
        if notice:
            with contextlib.suppress(DeadlineError):  # the run may end meanwhile
                requests.ask_to_leave(folder, there[-1], LEAVE_S)
        last = next(node for node in cluster.worker_nodes if node.node_id == there[-1])
        cluster.remove_node(last, allow_graceful=False)
        notice = not notice
        if not over.wait(period_s):
            cluster.add_node(num_cpus=1, object_store_memory=10**8)


def measure(given: argparse.Namespace, name: str, folder: str, *overrides: str) -> Watch:
    """One run on a Ray of its own."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")  # as for a Ray that a run starts itself
    ray.shutdown()  # a benchmark's is another than whoever calls it may have
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 10**8})
    over = threading.Event()
    try:
        for _ in range(1 + given.engines):
            cluster.add_node(num_cpus=1, object_store_memory=10**8)
        of_run = {"run.name": name, "run.folder": folder, "run.steps": given.steps, "resources.ray_address": cluster.address}
        fields = [*(f"{key}={value}" for key, value in of_run.items()), PACED, *given.overrides, *overrides]
        config = load_config(ROOT / "examples/recipes/elastic_engines.yaml", fields)
        with watched() as watch, contextlib.redirect_stdout(io.StringIO()):
            comings = threading.Thread(target=come_and_go, args=(cluster, config, given.engines, given.period, over))
            if name == "elastic":
                comings.start()
            train(config)
            over.set()
            if name == "elastic":
                comings.join()
        return watch
    finally:
        over.set()
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    """Measure and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--engines", type=int, default=4, help="at most")
    parser.add_argument("--period", type=float, default=30.0, help="seconds for which the last engine's node stays, or is away")
    parser.add_argument("overrides", nargs="*", help="fields of the config")
    given = parser.parse_args()
    least, most = given.engines - 1, given.engines
    with tempfile.TemporaryDirectory() as folder:
        fixed = measure(given, "fixed", folder, f"rollout.engines={most}", f"rollout.max_engines={most}")
        elastic = measure(given, "elastic", folder, f"rollout.engines={least}", f"rollout.max_engines={most}")
    first = {number: comings[:1] for number, comings in elastic.comings.items()}
    later = [one for number, comings in elastic.comings.items() for one in comings[len(first[number]) :]]
    came = [one for one in later if one.first_request is not None]
    joins = [
        {"own_start_s": one.start_s, "to_first_request_s": one.first_request - one.began}
        for one in came
        if one.first_request is not None
    ]
    runs = {"fixed": fixed.figures(), "elastic": elastic.figures()}
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "code": code_of("elastic_engines"),
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions(),
        "setup": {"steps": given.steps, "engines": [least, most], "period_s": given.period, "overrides": given.overrides},
        "runs": runs,
        "kept": runs["elastic"]["tokens_per_engine_s"] / runs["fixed"]["tokens_per_engine_s"],
        "joins": joins,
        "join_over_own_start": median(one["to_first_request_s"] / one["own_start_s"] for one in joins) if joins else None,
    }
    publish(report, given.out)


if __name__ == "__main__":
    main()
