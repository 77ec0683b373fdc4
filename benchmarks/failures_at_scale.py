"""The share of its time that a run of 16,384 H100 loses to failures at the published rate: with restarts from disk, and with
spares. A simulation in virtual time: nothing is measured here.

    python benchmarks/failures_at_scale.py --out benchmarks/results/failures_at_scale.json --page docs/evidence/faults.md

What happens after a failure is decided by megarl's own state machines (`options/elastic`: which checkpoint in memory is whole,
who has it, which spare is taken, when replicas are given up and taken back; `benchmarks/virtual_ranks.py` answers for Ray), and
by the rules of restarts (`supervise/restarts.py`). How long each activity takes is planned or assumed; the JSON has them all.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.measured_code import code_of  # noqa: E402
from benchmarks.pages import put_into  # noqa: E402
from benchmarks.virtual_ranks import Cluster, Failure, in_place_of_ray, replacement, run_of  # noqa: E402
from megarl.config import load_config  # noqa: E402
from megarl.config.layout import Layout  # noqa: E402
from megarl.errors import ClusterError, DeadlineError, RankLostError, WorkerError  # noqa: E402
from megarl.options.elastic.copies_plan import copies_of  # noqa: E402
from megarl.planning.gpus import GPUS_PER_NODE, gpu_named  # noqa: E402
from megarl.planning.plan import make_plan  # noqa: E402
from megarl.supervise.restarts import FIRST_WAIT_S, LONGEST_WAIT_S  # noqa: E402
from megarl.workers.cluster import FEWER_S  # noqa: E402

DAY_S = 86_400.0
GONE = "state in nobody's memory"
PUBLISHED = json.loads((ROOT / "benchmarks/published/interruptions.json").read_text())
MEASURED = ROOT / "benchmarks/results/replaced_ranks.json"
CONFIG = "examples/plans/llama-3.1-405b-grpo-512xh200.yaml"
OVERRIDES = (
    "resources.gpu=h100",
    "resources.spares=0",
    "policy.layout={tp: 8, pp: 16, dp: 128, sequence_parallel: true, first_stage_layers: 7, last_stage_layers: 7}",
    "rollout.engines=1024",
    "rollout.tp=16",
    "rollout.prompts_per_step=4096",
    "model.recompute=selective",
)
"""The ready plan of Llama 3.1 405B on 16,384 H100: each stage of a replica is a node."""
PARAMETERS = 405.9e9
ASSUMED: dict[str, tuple[float, str]] = {
    "repair": (12 * 3600.0, "until a node that failed is back: nothing published was found"),
    "notice process": (5.0, "until Ray says that a process on a node that is there has ended"),
    "notice node": (30.0, "until Ray says that a node is gone (its health checks: 5 in a row, one every 3 s, some late)"),
    "notice hang": (600.0, "until a collective in which a rank hangs is given up: NCCL's default timeout of 10 minutes"),
    "start process": (60.0, "until a process has imported torch and megatron, from a file system that all share"),
    "start driver": (30.0, "the same for a driver with its config and rows, before it starts anything"),
    "start engines": (300.0, "servers of 405B: weights read, graphs captured; trainer and engines load at the same time"),
    "leave": (5.0, "for ranks to abort their collectives; megarl waits up to 20 s"),
    "become": (10.0, "for a process to be another rank and to build its model"),
    "connect": (30.0, "process groups of over 10,000 GPUs: under 30 s, by MegaScale (arXiv:2402.15627), section 3.5"),
    "storage bytes per s": (2e12, "the file system's sustained rate, by the Llama 3 paper, section 3.3.1"),
    "memory bytes per s": (1e9, "from memory of other nodes into a rank, by messages of Ray"),
}
"""Seconds, or what the name says."""
NOTES = (
    "checkpoints on disk cost steps nothing",
    "a loss while engines generate is noticed when ranks work next, and the other engines lose no time by it",
    "silent damage is found at the end of its step, as by resources.compare_replicas: 1, and nobody knows it before",
    "a run that restarts with all of its replicas takes as many spares as there are",
    "nodes that wait do not fail; the rate is that of the nodes in use",
    "with fewer replicas log-probs and updates take longer in proportion; generation does not",
)
"""Assumptions that are no numbers."""


@dataclass(frozen=True)
class Scenario:
    """A run, and how often what fails. `spares` in GPUs; None: it restarts from disk. `pairs`: network failures take the node's
    buddy, too."""

    name: str
    spares: int | None
    save_every: int = 10
    rate: float = 1.0
    pairs: bool = False
    connect_s: float | None = None
    spare_gpus: int = 128
    """GPUs that wait for a restart, where it is from disk: on average 27 GPUs are being repaired."""


def scenarios() -> list[Scenario]:
    """Every pair of today's and of spares, and what else was varied."""
    today, then = Scenario("today", None), Scenario("spares", 32)
    return [
        *(replace(today, name=f"today, save_every {every}", save_every=every) for every in (1, 5, 10, 50)),
        replace(today, name="today, save_every 10, 32 GPUs wait", spare_gpus=32),
        replace(then, name="spares 32"),
        *(replace(then, name=f"spares {number}", spares=number) for number in (0, 8)),
        *(replace(then, name=f"spares, {rate:g}x the rate", rate=rate) for rate in (2.0, 4.0)),
        *(replace(today, name=f"today, save_every 10, {rate:g}x the rate", rate=rate) for rate in (2.0, 4.0)),
        *(replace(then, name=f"spares, pairs lost, save_every {every}", pairs=True, save_every=every) for every in (1, 10, 50)),
        replace(then, name="spares, groups in 300 s", connect_s=300.0),
    ]


def planned() -> dict[str, float]:
    """Seconds of a step and of its parts, and of checkpoints in memory, by megarl's planner."""
    plan = make_plan(load_config(ROOT / CONFIG, list(OVERRIDES)), gpu_named("h100"))
    assert plan.fits, plan.excess
    copies, times = copies_of(plan), plan.times
    assert copies is not None
    replicas = plan.run.roles[0].layout.dp
    return {
        "gpus": plan.run.gpus,
        "step_s": times.step_seconds,
        "generate_s": times.seconds("sync") + times.seconds("generate"),
        "copy_s": copies.copy_s,
        "send_s": copies.send_s,
        "weight_bytes_read": 2 * PARAMETERS * replicas,
        "checkpoint_bytes": 14 * PARAMETERS,
        "rank_weight_bytes": 2 * PARAMETERS * replicas / plan.run.gpus,
    }


def seconds_of(plan: dict[str, float], scenario: Scenario) -> dict[str, float]:
    """By activity its seconds."""
    found = {name: value for name, (value, _) in ASSUMED.items()}
    if MEASURED.exists():
        found["become"] = statistics.median(json.loads(MEASURED.read_text())["lost_to_resumed_s"])
    storage = found["storage bytes per s"]
    found |= {"copy": plan["copy_s"], "send": plan["send_s"], "load weights": plan["weight_bytes_read"] / storage}
    found["load checkpoint"] = (plan["weight_bytes_read"] + plan["checkpoint_bytes"]) / storage
    found["write checkpoint"] = plan["checkpoint_bytes"] / storage
    found["put back"] = plan["rank_weight_bytes"] / found["memory bytes per s"]
    if scenario.connect_s is not None:
        found["connect"] = scenario.connect_s
    return found


def failures(scenario: Scenario, seed: int, kinds: list[dict[str, Any]]) -> Iterator[Failure]:
    """Failures at random times, at the published rate of each kind."""
    generator = np.random.default_rng(seed)
    counts = np.array([kind["count"] for kind in kinds])
    mean_s = PUBLISHED["days"] * DAY_S / counts.sum() / scenario.rate
    at_s = 0.0
    while True:
        at_s += generator.exponential(mean_s)
        kind = kinds[generator.choice(len(kinds), p=counts / counts.sum())]
        is_pair = scenario.pairs and kind["name"].startswith("Network")
        yield Failure(at_s, kind["name"], "pair" if is_pair else kind["effect"], float(generator.random()))


class Simulation:
    """A run of some days. `places` are nodes: a stage of a replica each."""

    def __init__(self, scenario: Scenario, plan: dict[str, float], layout: Layout, days: float, seed: int) -> None:
        self.scenario, self.plan, self.layout, self.days = scenario, plan, layout, days
        self.seconds = seconds_of(plan, scenario)
        spare_nodes = (scenario.spare_gpus if scenario.spares is None else scenario.spares) // GPUS_PER_NODE
        self.spare_nodes = spare_nodes
        of_run = failures(scenario, seed, PUBLISHED["kinds"])
        self.cluster = Cluster(layout.world_size, spare_nodes, self.seconds, of_run)
        self.step = 0
        self.starts_with = layout
        """The layout of the attempt, which has fewer replicas where there were not places for all."""
        self.written: list[tuple[float, int]] = []
        self.why: dict[str, int] = {}
        self.restarts = self.replaced = self.shrunk_steps = 0
        self._looked_at: set[tuple[str, int]] = set()

    def result(self) -> dict[str, Any]:
        """Simulate, and say what was lost."""
        with in_place_of_ray(self.cluster):
            while self.cluster.now < self.days * DAY_S:
                self._attempt()
        useful = self.step * self.plan["step_s"]
        return {
            "lost": 1 - useful / self.cluster.now,
            "steps": self.step,
            "failures": sum(self.cluster.counts.values()),
            "restarts_from_disk": self.restarts,
            "replacements": self.replaced,
            "steps_with_fewer_replicas": self.shrunk_steps,
            "restarts_of_failures_while_ranks_were_replaced": sum(self.why.values()) - self.why.get(GONE, 0),
        }

    def _attempt(self) -> None:
        """A process that trains, from its start until a loss that it does not survive."""
        began = self.step
        try:
            if self.scenario.spares is None:
                self._from_disk_alone()
            else:
                self._with_spares(self.scenario.spares // GPUS_PER_NODE)
        except (WorkerError, DeadlineError) as error:  # RankLostError is a WorkerError
            why = GONE if isinstance(error, RankLostError) else str(error)
            self.why[why] = self.why.get(why, 0) + 1
        if self.cluster.now >= self.days * DAY_S:
            return
        self._restart(has_run=self.step > began)

    def _restart(self, *, has_run: bool) -> None:
        """From the newest whole checkpoint, once there are nodes: for all places, or, with spares, for some replicas."""
        cluster, seconds = self.cluster, self.seconds
        self.restarts += 1
        if cluster.last is not None and self.scenario.spares is None:
            effect = {"pair": "node", "silent": "process"}.get(cluster.last.effect, cluster.last.effect)
            cluster.advance(cluster.now + seconds[f"notice {effect}"])
        self.step = max((step for at_s, step in self.written if at_s <= cluster.now), default=0)
        cluster.group = cluster.memory = None
        cluster.release()
        wait_s = FIRST_WAIT_S if has_run else 2 * FIRST_WAIT_S
        of_trainer = sum(seconds[name] for name in ("start process", "connect", "load weights", "load checkpoint"))
        while True:
            cluster.advance(cluster.now + wait_s + seconds["start driver"])
            self.starts_with = self.layout
            if not self._has_places() and self.scenario.spares is not None:
                cluster.advance(cluster.now + FEWER_S)
                self.starts_with = cluster.settle(self.layout)
            if self._has_places():
                failed = sum(cluster.counts.values())
                cluster.advance(cluster.now + max(of_trainer, seconds["start engines"]))
                if failed == sum(cluster.counts.values()):
                    return
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _has_places(self) -> bool:
        """Whether Ray finds a node for each place of the layout that the run starts with."""
        of_run = self.cluster.node_of[: self.starts_with.world_size]
        lost = [number for number, node in enumerate(of_run) if node in self.cluster.lost_nodes]
        return None not in [self.cluster.place_again(number) for number in lost]

    def _save_if_due(self) -> None:
        if self.step % self.scenario.save_every == 0:
            self.written = [*self.written[-3:], (self.cluster.now + self.seconds["write checkpoint"], self.step)]

    def _steps_until_a_failure(self, step_s: float, *, at_most: float) -> None:
        """Do the steps that nothing disturbs."""
        until = min(self.cluster.next_failure_s, self.days * DAY_S, at_most)
        while self.cluster.now + step_s < until:
            self.cluster.advance(self.cluster.now + step_s)
            self.step += 1
            self._save_if_due()

    def _from_disk_alone(self) -> None:
        cluster = self.cluster
        cluster.group = None
        if not self._has_places():
            return
        self._steps_until_a_failure(self.plan["step_s"], at_most=float("inf"))
        if cluster.next_failure_s < self.days * DAY_S:
            cluster.advance(cluster.next_failure_s)
        else:
            cluster.advance(self.days * DAY_S)

    def _with_spares(self, spares: int) -> None:
        cluster, plan = self.cluster, self.plan
        try:
            at, spare_nodes = self.starts_with, min(spares, len(cluster.free)) if self.starts_with == self.layout else 0
            recovery, group = replacement(cluster, at, spare_nodes, shrink=True, whole=self.layout)
        except ClusterError:  # as of any failed start
            return
        whole = self.layout.dp
        while cluster.now < self.days * DAY_S:
            train_s = (plan["step_s"] - plan["generate_s"]) * whole / group.layout.dp
            step_s = plan["generate_s"] + train_s + plan["copy_s"]
            grows_s = self._next_growth_s(recovery) if group.layout.dp < whole else float("inf")
            before = self.step
            self._steps_until_a_failure(step_s, at_most=grows_s)
            self.shrunk_steps += (self.step - before) * (group.layout.dp < whole)
            self._disturbed_step(recovery, group)

    def _next_growth_s(self, recovery: Any) -> float:
        """When replicas may come back: at once where places that the last step did not have are there, else when a node is
        repaired."""
        if _there(recovery) != self._looked_at:
            return self.cluster.now
        return self.cluster.repairs[0] if self.cluster.repairs else float("inf")

    def _disturbed_step(self, recovery: Any, group: Any) -> None:
        """A step in which something fails, or in which replicas come back, as the loop does it."""
        cluster, run, whole = self.cluster, run_of(self.step), self.layout.dp
        if recovery._memory.kept is None:
            recovery._memory.begin((run.step, 0))
        recovery._memory.finish()
        recovery._memory.kept.moment = (run.step, 0)  # checkpoints of the steps since differ in nothing else
        recovery.again(run, lambda: group.work(0.0))  # the engines get the weights
        cluster.advance(cluster.now + self.plan["generate_s"])
        for attempt in recovery.attempts(run):
            with attempt:
                group.work((self.plan["step_s"] - self.plan["generate_s"]) * whole / group.layout.dp)
        self.replaced += run.metrics["recovery/seconds"] > 0
        self.step += 1
        self.shrunk_steps += group.layout.dp < whole
        self._looked_at = _there(recovery)
        self._save_if_due()


def _there(recovery: Any) -> set[tuple[str, int]]:
    """Lost places that have a node again, by group and number."""
    return {place for place, (actor, _) in recovery._places._sought.items() if actor.has_node()}


def table(found: dict[str, Any]) -> str:
    """The page's table."""
    days = f"{found['setup']['days']:g} days"
    head = ("run", "time lost", f"failures in {days}", "restarts from disk", "losses replaced", "steps with fewer replicas")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found["scenarios"]:
        result = row["mean"]
        figures = [f"{result[name]:,.0f}" for name in ("failures", "restarts_from_disk", "replacements")]
        few = f"{result['steps_with_fewer_replicas'] / max(1, result['steps']):.1%}"
        low, high = row["lost_of_seeds"]
        lines.append(f"| {row['name']} | **{result['lost']:.2%}** ({low:.2%} to {high:.2%}) | {' | '.join(figures)} | {few} |")
    assumed = [f"{name} {value:,.4g}" for name, value in found["seconds"].items() if not name.endswith("per s")]
    return "\n".join(
        [*lines, "", f"Seconds of activities: {', '.join(assumed)}. A step takes {found['plan']['step_s']:,.0f} s."]
    )


def simulated(scenario: Scenario, plan: dict[str, float], layout: Layout, days: float, seed: int) -> dict[str, float]:
    """Simulate a run in one scenario, with the failures of one seed; gives what it lost."""
    return Simulation(scenario, plan, layout, days, seed).result()


def main() -> None:
    """Simulate, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("failures_at_scale.json"), help="JSON file to write")
    parser.add_argument("--page", type=Path, help="page whose table between marks is written anew")
    parser.add_argument("--days", type=float, default=float(PUBLISHED["days"]))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--replicas", type=int, default=128, help="of 16 nodes each; the rate stays that of 16,384 GPUs")
    parser.add_argument("--only", nargs="+", help="scenarios whose names begin so")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time")
    given = parser.parse_args()
    plan, layout, rows = planned(), Layout(pp=16, dp=given.replicas), []
    chosen = [scenario for scenario in scenarios() if not given.only or scenario.name.startswith(tuple(given.only))]
    with ProcessPoolExecutor(given.processes) as pool:
        found_of = {
            (scenario.name, seed): pool.submit(simulated, scenario, plan, layout, given.days, seed)
            for scenario in chosen
            for seed in given.seeds
        }
        for scenario in chosen:
            results = [found_of[scenario.name, seed].result() for seed in given.seeds]
            mean = {name: statistics.fmean(result[name] for result in results) for name in results[0]}
            lost = [result["lost"] for result in results]
            rows.append({**asdict(scenario), "mean": mean, "lost_of_seeds": [min(lost), max(lost)]})
            print(scenario.name, {name: round(value, 4) for name, value in mean.items()}, flush=True)
    seconds = seconds_of(plan, Scenario("", None))
    found = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "code": code_of("failures_at_scale"),
        "kind": "simulation: nothing was measured",
        "published": {name: PUBLISHED[name] for name in ("source", "url", "gpus", "days", "note")},
        "interruptions": sum(kind["count"] for kind in PUBLISHED["kinds"]),
        "setup": {"config": CONFIG, "overrides": list(OVERRIDES), "nodes": layout.world_size, "days": given.days},
        "seeds": given.seeds,
        "plan": plan,
        "assumed": {name: {"value": value, "why": why} for name, (value, why) in ASSUMED.items()},
        "notes": list(NOTES),
        "become_is_measured": MEASURED.exists(),
        "seconds": seconds,
        "scenarios": rows,
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.page is not None:
        put_into(given.page, "failures_at_scale", table(found))


if __name__ == "__main__":
    main()
