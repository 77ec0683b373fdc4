"""What a step costs the driver at 16 to 10,240 ranks: its CPU seconds, the bytes that it sends, and its memory.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json

The driver's own code runs on a GRPO step with KL to a reference, whose tokens lie in a store: 8 responses of 8,000 tokens on
average for each GPU (`WORLDS`), two passes for log-probs, advantages and one update. Ranks are simulated: what they are sent is
pickled as Ray would pickle it, and they answer nothing. Calls of Ray itself are in `benchmarks/rank_calls.py`. Seconds are of
the driver's CPU, one thread; bytes are those of all arguments, and those of tokens and token columns among them.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megarl.algorithms import LossSettings, RunningMean
from megarl.config import Layout, parse_config
from megarl.data.sample import Prompt
from megarl.data.shares import Share
from megarl.data.stored import Held, StoredGeneration, StoredSample
from megarl.data.stored_batch import StoredBatch
from megarl.data.stored_shares import Computed, RowTask
from megarl.experience.estimation import TokenOutcome, estimate_part
from megarl.experience.experience import Experience, RowFacts, set_loss_weights
from megarl.experience.objectives import PolicyObjective
from megarl.experience.step_tokens import count_older_tokens
from megarl.models.flops import FlopsModel
from megarl.models.shape import ModelShape
from megarl.runs.training_side import POLICY, REFERENCE
from megarl.system.garbage import collect_rarely
from megarl.workers import roles as roles_module
from megarl.workers.role_specs import role_specs
from megarl.workers.roles import Roles

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples/models/llama-3.1-70b"
TP, PP, GROUP, PROMPT = 4, 2, 8, 512
LONGEST, MEAN, SPREAD = 32_768, 8000, 0.9
WORLDS = {16: 128, 256: 2048, 1024: 8192, 4096: 32_768, 10_240: 65_280}
"""Ranks, and responses of a step."""
PARTS = ("taking", "batch", "planning", "shares", "advantages", "serialising", "collection")


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
    """Ranks that are sent what Ray would send them, and answer what the driver needs of them, without doing anything."""

    name, platform = POLICY, "cpu"

    def __init__(self, layout: Layout, clock: Clock) -> None:
        self.layout, self.clock = layout, clock
        self.reporting = [rank for rank in range(layout.world_size) if self._reports(rank)]
        self.sent_bytes = self.token_bytes = self.calls = 0

    def _reports(self, rank: int) -> bool:
        at = self.layout.coords(rank)
        return at.tp == 0 and at.cp == 0 and at.pp == self.layout.pp - 1

    def shared(self, value: Any) -> str:
        """Pickle a value once."""
        with self.clock("serialising"):
            self.sent_bytes += len(pickle.dumps(value, protocol=5))
        return "reference"

    def whole(self, replica: int, shares: Sequence[Share]) -> str:
        """Pickle a replica's shares, without the handles, which are arguments of their own."""
        for share in shares:
            columns = (*share.columns.values(), share.mask, share.token_ids)
            self.token_bytes += sum(column.nbytes for column in columns)
        self.calls += 1
        return self.shared([{**vars(share), "objects": len(getattr(share, "objects", ()))} for share in shares])

    def per_rank(self, replicas: Sequence[Sequence[Share]]) -> list[str]:
        """One reference per rank."""
        references = [self.whole(replica, shares) for replica, shares in enumerate(replicas)]
        return [references[self.layout.coords(rank).dp] for rank in range(self.layout.world_size)]

    def submit(self, method: Callable[..., Any], per_rank: Sequence[Any]) -> list[Any]:
        """Pickle each rank's arguments; the answer to an update is its metrics."""
        return [self._answer(method.__name__, rank, arguments) for rank, arguments in enumerate(per_rank)]

    def submit_stored(self, method: Callable[..., Any], per_rank: Mapping[int, Any]) -> dict[int, bytes]:
        """The same for some ranks, whose second values stay where they are."""
        return {rank: self._answer(method.__name__, rank, arguments) for rank, arguments in per_rank.items()}

    def wait_stored(self, submitted: Mapping[int, bytes], *, phase: str, deadline_s: float) -> dict[int, tuple[Any, Held]]:
        """The first values, unpickled, with handles to nothing."""
        with self.clock("collection"):
            return {rank: (pickle.loads(answer), Held(None)) for rank, answer in submitted.items()}

    def _answer(self, method: str, rank: int, arguments: Sequence[Any]) -> bytes:
        with self.clock("serialising"):
            self.calls += 1
            self.sent_bytes += len(pickle.dumps((method, *arguments), protocol=5))
        if method == "compute":
            outcome = TokenOutcome(metrics={}, baseline=RunningMean(), kl=None, kl_rows=0, entropy=None)
            return pickle.dumps(Computed(outcome, ["advantages"], None))
        if method == "update":
            return pickle.dumps(dict.fromkeys(map(str, range(20)), 0.0) if self._reports(rank) else {})
        return pickle.dumps(None)

    def wait(self, submitted: Sequence[bytes], *, phase: str, deadline_s: float) -> list[Any]:
        """The answers, unpickled."""
        with self.clock("collection"):
            return [pickle.loads(answer) for answer in submitted]


def run_config(world: int, responses: int) -> Any:
    """A GRPO run of so many ranks and responses."""
    return parse_config(
        {
            "model": {"path": str(MODEL)},
            "policy": {
                "layout": {"tp": TP, "pp": PP, "dp": world // (TP * PP)},
                "max_tokens_per_micro_batch": LONGEST + PROMPT,
            },
            "algorithm": {"name": "grpo", "kl": {"coef": 0.04}},
            "data": {"train": {"source": "reasoning_gym", "name": "chain_sum"}, "max_prompt_tokens": PROMPT},
            "rollout": {
                "engines": max(1, world // 8), "tp": 8, "prompts_per_step": responses // GROUP,
                "samples_per_prompt": GROUP, "max_new_tokens": LONGEST,
            },
            "rewards": [{"name": "exact_number"}],
        }
    )  # fmt: skip


def answers_of(responses: int, mean: int) -> Iterator[bytes]:
    """The pickled answers of engines, one for each group, with lognormal lengths."""
    chance = np.random.default_rng(0)
    drawn = chance.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, responses)
    lengths = np.clip(drawn, 1, LONGEST).astype(int).reshape(-1, GROUP)
    nowhere = Held(None)
    for of_group in lengths.tolist():
        places = enumerate(of_group)
        yield pickle.dumps(
            [
                StoredGeneration(nowhere, nowhere, place, length, ((0, length),), "stop", {}, member=place)
                for place, length in places
            ],
            protocol=5,
        )


def step_figures(world: int, responses: int, mean: int = MEAN) -> dict[str, float]:
    """Seconds of one step's driver by part, bytes and calls."""
    config, clock = run_config(world, responses), Clock()
    group = SimulatedGroup(config.policy.layout, clock)
    flops = FlopsModel.of(ModelShape.read(MODEL))
    answers = [*answers_of(responses, mean)]
    prompts = [Prompt(str(number), str(number), [number] * PROMPT, "") for number in range(len(answers))]
    planner = roles_module.plan_micro_batches

    def planned(*arguments: Any, **settings: Any) -> Any:
        with clock("planning"):
            return planner(*arguments, **settings)

    with mock.patch.object(roles_module, "plan_micro_batches", planned):
        roles = Roles(config, role_specs(config), {POLICY: group}, "transformer_engine", flops, sampling=None, updates=1)
        experience, samples = Experience(config), []
        with clock("taking"):
            for prompt, answer in zip(prompts, answers, strict=True):
                turns = pickle.loads(answer)
                samples += [StoredSample(prompt, number, turn) for number, turn in enumerate(turns)]
        del answers
        with clock("batch"):
            batch = StoredBatch(samples)
            count_older_tokens(batch, 0)
        for role, names in (
            (POLICY, ["old_log_probs", "old_entropy"]),
            (REFERENCE, ["reference_log_probs", "reference_entropy"]),
        ):
            with clock("shares"):
                roles.forward(role, batch, names)
        with clock("advantages"):
            rows = experience.row_inputs(RowFacts.of(batch), [float(row % 2) for row in range(len(batch))])
            outcome = roles.compute(batch, RowTask(estimate_part, [config], lambda part: [rows.of_rows(part)]))[0]
            experience.take_outcome(rows, outcome)
            set_loss_weights(batch, range(len(batch)), config)
        read = ["weights", "advantages", "rollout_log_probs", "old_log_probs", "reference_log_probs"]
        with clock("shares"):
            objective = PolicyObjective("clip", LossSettings(), kl_coef=0.04)
            started = roles.start_update(POLICY, batch, range(len(batch)), read, objective)
        with clock("collection"):
            roles.finish_updates([started])
    figures: dict[str, float] = dict(clock.seconds)
    figures |= {"all": sum(clock.seconds.values()), "sent_bytes": group.sent_bytes, "token_bytes": group.token_bytes}
    return figures | {"calls": group.calls, "tokens": int(batch.lengths.sum())}


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--worlds", type=int, nargs="+", default=[*WORLDS], choices=WORLDS, help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, of which the median is told (default: 3)")
    arguments = parser.parse_args()
    from measured_code import code_of
    from workload import machine

    torch.set_num_threads(1)
    collect_rarely()  # as `megarl train` does
    report: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "code": code_of("scaling"),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "responses": {"mean_tokens": MEAN, "longest": LONGEST, "spread": SPREAD, "prompt": PROMPT, "group": GROUP},
        "layout": {"tp": TP, "pp": PP},
        "worlds": {},
    }
    for world in arguments.worlds:
        rounds = [step_figures(world, WORLDS[world]) for _ in range(arguments.rounds)]
        figures = {name: statistics.median(of_round[name] for of_round in rounds) for name in rounds[0]}
        figures |= {"responses": WORLDS[world], "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        report["worlds"][str(world)] = figures
        print(world, {name: round(figure, 4) for name, figure in figures.items()}, flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
