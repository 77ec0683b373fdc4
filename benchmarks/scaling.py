"""What a step costs the driver as workers are added: planning, packing, dispatch, collection, for 16 to 4,096 of them.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json            # simulated workers, one process
    python benchmarks/scaling.py --ray 16 32 64 --out benchmarks/results/scaling_ray.json   # real Ray actors that do nothing

The driver's own code runs on a GRPO step whose batch grows with the workers (`PER_REPLICA` sequences for each data-parallel
replica): two passes for log-probs and one update. Simulated workers are answers that were pickled before; what a network and a
remote machine add is not in it. Seconds are of the driver's CPU, one thread. With --ray, real actors take the calls and answer
with as many bytes; seconds are wall time.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megarl.config import Layout, parse_config
from megarl.data.answers import Answers
from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.experience.experience import Experience, set_loss_weights
from megarl.experience.objectives import PolicyObjective
from megarl.models.flops import FlopsModel
from megarl.models.shape import ModelShape
from megarl.planning.lengths import Lengths
from megarl.runs.training_side import POLICY, REFERENCE
from megarl.workers import roles as roles_module
from megarl.workers.roles import Roles, role_specs

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples/models/llama-3.1-70b"
TP, PP, PER_REPLICA, GROUP = 4, 2, 16, 8
PROMPT, LENGTHS = 128, Lengths(128, 384, 1024)
WORLDS = (16, 64, 256, 1024, 4096)
PARTS = ("batch", "advantages", "packing", "planning", "serialising", "dispatch", "collection")


class Clock:
    """CPU seconds by part, which other work on the machine lengthens least; a part inside another stops the outer one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._charge()
        self._stack.append(part)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def _charge(self) -> None:
        now = time.process_time()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now


class SimulatedGroup:
    """Ranks that answer at once with what was made for them before: `answers` by data-parallel replica, pickled."""

    name, platform = POLICY, "cpu"

    def __init__(self, layout: Layout, clock: Clock) -> None:
        self.layout, self.clock = layout, clock
        self.coords = [layout.coords(rank) for rank in range(layout.world_size)]
        self.answers: dict[str, list[bytes]] = {}
        self._nothing = {"forward": pickle.dumps(None), "update": pickle.dumps({})}

    def per_rank(self, replicas: Sequence[Any]) -> list[Any]:
        """Every replica's micro-batches, pickled once, as `ray.put` does."""
        with self.clock("serialising"):
            pickled = [pickle.dumps(value, protocol=5) for value in replicas]
            return [pickled[at.dp] for at in self.coords]

    def submit(self, method: Callable[..., Any], arguments: Any) -> list[bytes]:
        """One answer per rank; only reporting ranks have one that is not empty."""
        with self.clock("dispatch"):
            found = []
            for at, _ in zip(self.coords, arguments, strict=True):
                reports = at.tp == 0 and at.cp == 0 and at.pp == self.layout.pp - 1
                found.append(self.answers[method.__name__][at.dp] if reports else self._nothing[method.__name__])
            return found

    def wait(self, submitted: Sequence[bytes], *, phase: str, deadline_s: float) -> list[Any]:
        """The answers, unpickled."""
        with self.clock("collection"):
            return [pickle.loads(answer) for answer in submitted]

    def call(self, method: Callable[..., Any], *arguments: Any, phase: str, deadline_s: float) -> list[Any]:
        """As `submit` and `wait`."""
        per_rank = [arguments] * self.layout.world_size
        return self.wait(self.submit(method, per_rank), phase=phase, deadline_s=deadline_s)


def run_config(world: int) -> Any:
    """A GRPO run of so many ranks, whose batch grows with them."""
    dp = world // (TP * PP)
    return parse_config(
        {
            "model": {"path": str(MODEL)},
            "policy": {"layout": {"tp": TP, "pp": PP, "dp": dp}, "max_tokens_per_micro_batch": 8192},
            "algorithm": {"name": "grpo"},
            "data": {"train": {"source": "reasoning_gym", "name": "chain_sum"}, "max_prompt_tokens": PROMPT},
            "rollout": {
                "engines": max(1, world // 8), "tp": 8, "prompts_per_step": dp * PER_REPLICA // GROUP,
                "samples_per_prompt": GROUP, "max_new_tokens": LENGTHS.longest,
            },
            "rewards": [{"name": "exact_number"}],
        }
    )  # fmt: skip


def samples_of(count: int) -> list[Sample]:
    """A step's samples, with the planner's spread of lengths."""
    chance = np.random.default_rng(0)
    lengths = chance.choice(LENGTHS.responses, count).astype(int)
    found = []
    for row, length in enumerate(lengths.tolist()):
        group = str(row // GROUP)
        ones = [1] * length
        found.append(
            Sample(str(row), group, group, [row // GROUP] * PROMPT, list(range(length)), ones, [-1.0] * length, ones, "stop")
        )
    return found


def step_seconds(world: int) -> dict[str, float]:
    """Seconds of one step's driver by part."""
    config, clock = run_config(world), Clock()
    group = SimulatedGroup(config.policy.layout, clock)
    flops = FlopsModel.of(ModelShape.read(MODEL))
    samples = samples_of(config.policy.layout.dp * PER_REPLICA)
    planner = roles_module.plan_micro_batches

    def planned(*arguments: Any, **settings: Any) -> Any:
        with clock("planning"):
            return planner(*arguments, **settings)

    with mock.patch.object(roles_module, "plan_micro_batches", planned):
        roles = Roles(config, role_specs(config), {POLICY: group}, "transformer_engine", flops, sampling=None, updates=1)
        with clock("batch"):
            batch = Batch(samples)
        group.answers = _answers(batch, config.policy.layout.dp)
        for role, names in (
            (POLICY, ["old_log_probs", "old_entropy"]),
            (REFERENCE, ["reference_log_probs", "reference_entropy"]),
        ):
            with clock("packing"):
                answers = _forward(roles, role, batch)
            with clock("collection"):
                batch.gather(names, answers)
        with clock("advantages"):
            Experience(config).estimate(batch, [float(row % 2) for row in range(len(batch))])
            set_loss_weights(batch, range(len(batch)), config)
        with clock("packing"):
            started = roles.start_update(
                POLICY,
                batch,
                range(len(batch)),
                ["weights", "advantages", "old_log_probs", "reference_log_probs"],
                _objective(),
            )
        with clock("collection"):
            roles.finish_updates([started])
    return clock.seconds


def _forward(roles: Roles, role: str, batch: Batch) -> list[Any]:
    """`Roles.forward` without its last line, which is timed by itself."""
    found: list[Any] = []
    with mock.patch.object(batch, "gather", lambda names, answers, wide, *, asked: found.extend(answers)):
        roles.forward(role, batch, [])
    return found


def _objective() -> Any:
    from megarl.algorithms import LossSettings

    return PolicyObjective("clip", LossSettings(), kl_coef=0.04)


def _answers(batch: Batch, replicas: int) -> dict[str, list[bytes]]:
    rows = np.array_split(np.arange(len(batch)), replicas)
    lengths = batch.lengths.numpy()
    passes = [Answers(some, lengths[some], np.zeros((2, lengths[some].sum()), np.float32)) for some in rows]
    return {
        "forward": [pickle.dumps(one, protocol=5) for one in passes],
        "update": [pickle.dumps({"policy/loss": 0.0})] * replicas,
    }


def ray_seconds(actors: int, calls: int) -> dict[str, float]:
    """Seconds of one call of real actors, and of waiting for 4,096 answers that are there."""
    import ray

    from megarl.workers.group import WorkerGroup, wait_for

    # Without torch in the actors: what is shared reaches them as a reference that they do not open.
    actor = ray.remote(num_cpus=0)(_Idle)
    group = WorkerGroup(POLICY, Layout(dp=actors), [actor.remote() for _ in range(actors)], "logs")
    began = time.perf_counter()
    answer: Any = _Idle.answer
    group.call(answer, [], 0, phase="start", deadline_s=300)
    found: dict[str, list[float]] = {"start": [time.perf_counter() - began]}
    values = [b"x" * 200_000] * actors
    for _ in range(calls):
        marks = [time.perf_counter()]
        shared = group.per_rank(values)
        marks.append(time.perf_counter())
        submitted = group.submit(answer, [([reference], 50_000) for reference in shared])
        marks.append(time.perf_counter())
        group.wait(submitted, phase="answer", deadline_s=300)
        marks.append(time.perf_counter())
        for name, first, last in zip(("serialising", "dispatch", "collection"), marks, marks[1:], strict=False):
            found.setdefault(name, []).append(last - first)
    waits = {}
    for count in WORLDS:
        references = [ray.put(b"x") for _ in range(count)]
        began = time.perf_counter()
        wait_for(references, phase="wait", deadline_s=300, whose=[f"value {number}" for number in range(count)])
        waits[f"wait_for_{count}"] = time.perf_counter() - began
    group.kill()
    return {name: statistics.median(each) for name, each in found.items()} | waits


class _Idle:
    def call(self, method: str, *arguments: Any) -> Any:
        """As `RankProcess.call`."""
        return getattr(self, method)(*arguments)

    def answer(self, shared: list[Any], nbytes: int) -> bytes:
        """As many bytes as asked for."""
        return b"y" * nbytes


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="numbers of simulated workers")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, of which the median is told (default: 3)")
    parser.add_argument("--ray", type=int, nargs="+", help="numbers of real actors, instead of simulated workers")
    arguments = parser.parse_args()
    from measured_code import code_of
    from workload import machine

    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "code": code_of("scaling"),
        "versions": {"python": platform.python_version(), "ray": version("ray"), "torch": version("torch")},
        "sequences_per_replica": PER_REPLICA,
        "worlds": {},
    }
    if arguments.ray:
        import ray

        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=512 * 2**20, log_to_driver=False)
        for actors in arguments.ray:
            report["worlds"][str(actors)] = found = ray_seconds(actors, 10)
            print(actors, {name: round(seconds, 4) for name, seconds in found.items()}, flush=True)
        ray.shutdown()
    else:
        for world in arguments.worlds:
            rounds = [step_seconds(world) for _ in range(arguments.rounds)]
            found = {part: statistics.median(each[part] for each in rounds) for part in PARTS}
            found["all"] = statistics.median(sum(each.values()) for each in rounds)
            report["worlds"][str(world)] = found | {"sequences": world // (TP * PP) * PER_REPLICA}
            print(world, {name: round(seconds, 4) for name, seconds in found.items()}, flush=True)
        sizes, seconds = (list(map(float, each)) for each in zip(*_totals(report), strict=True))
        report["growth"] = math.log(seconds[-1] / seconds[0]) / math.log(sizes[-1] / sizes[0]) if len(sizes) > 1 else None
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def _totals(report: dict[str, Any]) -> list[tuple[str, float]]:
    return [(world, found["all"]) for world, found in report["worlds"].items()]


if __name__ == "__main__":
    main()
