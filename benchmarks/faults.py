"""Does a run survive whatever happens to its processes? A tiny real run per trial, hit once at a random moment.

    make tiny-model
    python benchmarks/faults.py --trials 100 --seed 0 --out benchmarks/results/faults.json

A trial is good if the run completes, no prompt was lost or trained on twice, the samples and the final parameters are those of
the undisturbed run to the last bit, and no process of it is left. Half a minute a trial where a core is free for each rank;
`--at-once 2` has two under way at a time, since much of a trial is waiting for a deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from fault_trials import AGENT_KINDS, DEEDS, KINDS, TARGETS, RewardServer, Run, Trial, attempt, undisturbed
from workload import machine, versions

START_S = 12.0
"""Trials that are hit before the first step are hit within so many seconds of the start."""


def plan(trials: int, steps: int, step_s: float, kinds: list[str], draw: random.Random) -> list[Trial]:
    """Every kind in turn, in a random order, each at a moment drawn over the start and all steps."""
    order = [kinds[number % len(kinds)] for number in range(trials)]
    draw.shuffle(order)
    planned = []
    for kind in order:
        after = draw.randrange(steps)
        planned.append(Trial(kind, after, round(draw.uniform(0, step_s if after else START_S), 3)))
    return planned


def summary(trials: list[Trial]) -> dict[str, object]:
    """Counts and times over the trials."""
    times = [trial.recovered_s for trial in trials if trial.recovered_s is not None and trial.hit]
    by_kind = defaultdict(list)
    for trial in trials:
        by_kind[trial.kind].append(trial)
    return {
        "trials": len(trials),
        "hit": sum(bool(trial.hit) for trial in trials),
        "completed": sum(trial.completed for trial in trials),
        "good": sum(trial.is_good for trial in trials),
        "prompts_lost": sum(max(0, trial.prompts_lost) for trial in trials),
        "prompts_duplicated": sum(max(0, trial.prompts_duplicated) for trial in trials),
        "identical_parameters": sum(trial.same_parameters for trial in trials),
        "left_processes_behind": sum(bool(trial.left_behind) for trial in trials),
        "median_recovered_s": round(statistics.median(times), 2) if times else None,
        "longest_recovered_s": max(times, default=None),
        "by_kind": {
            kind: {
                "trials": len(some),
                "good": sum(trial.is_good for trial in some),
                "median_recovered_s": round(
                    statistics.median([t.recovered_s for t in some if t.recovered_s is not None] or [0]), 2
                ),
            }
            for kind, some in sorted(by_kind.items())
        },
    }


def report(done: list[Trial], step_s: float, command: str) -> dict[str, object]:
    """What is written: how it was measured, the summary, and every trial."""
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "deeds": {deed: words for deed, (_, words) in DEEDS.items()},
        "targets": TARGETS,
        "undisturbed_step_s": round(step_s, 3),
        **summary(done),
        "trial": [asdict(one) for one in done],
    }


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--trials", type=int, default=len(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--agents", action="store_true", help="runs whose episodes an agent acts in, and the kinds that hit it")
    parser.add_argument("--adapters", action="store_true", help="runs that train adapters, which alone go to the engine")
    parser.add_argument("--kinds", nargs="+", help="such as 'kill rank'; default: all")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs; the same command goes on where it was stopped")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trials under way at the same time")
    parser.add_argument("--for-s", type=float, default=float("inf"), metavar="S", help="begin none later than after so long")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every trial")
    arguments = parser.parse_args()
    known = AGENT_KINDS if arguments.agents else KINDS
    arguments.kinds = arguments.kinds or list(known)
    unknown = set(arguments.kinds) - set(known)
    if unknown:
        parser.error(f"--kinds {', '.join(sorted(unknown))}: may be {', '.join(known)}")
    return arguments


class Campaign:
    """The trials of one command, each with a reward server of its own while it is under way."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self._servers: queue.SimpleQueue[RewardServer] = queue.SimpleQueue()
        self._ends_at = time.monotonic() + arguments.for_s

    def run(self) -> list[Trial]:
        """All trials that are done by now, in the order planned."""
        arguments, draw = self.arguments, random.Random(self.arguments.seed)
        done: dict[int, Trial] = {}
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(arguments.at_once) as pool:
            for number in range(arguments.at_once):
                server = RewardServer(self.folder, f"reward-{number}", agents=arguments.agents, adapters=arguments.adapters)
                stack.callback(server.stop)
                self._servers.put(server)
            with self._server() as server:
                reference, step_s = undisturbed(self.folder, server, arguments.steps)
            print(f"undisturbed: {step_s:.2f} s a step", flush=True)
            planned = plan(arguments.trials, arguments.steps, step_s, arguments.kinds, draw)
            begun = {pool.submit(self._one, number, trial, reference, step_s): number for number, trial in enumerate(planned)}
            for future in as_completed(begun):
                number, trial = begun[future], future.result()
                if trial is None:
                    continue
                done[number] = trial
                print(f"{number + 1}/{len(planned)} {'good' if trial.is_good else 'BAD '} {asdict(trial)}", flush=True)
                if arguments.out:
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    command = " ".join(["benchmarks/faults.py", *sys.argv[1:]])
                    written = report([done[at] for at in sorted(done)], step_s, command)
                    arguments.out.write_text(json.dumps(written, indent=1) + "\n")
        return [done[at] for at in sorted(done)]

    def _one(self, number: int, trial: Trial, reference: Run, step_s: float) -> Trial | None:
        """The trial, done now or by an earlier command; None: there is no time for it."""
        kept = self.folder / f"trial-{number:03d}.json"
        if kept.exists():
            return Trial(**json.loads(kept.read_text()))
        if time.monotonic() > self._ends_at:
            return None
        draw = random.Random(f"{self.arguments.seed} {number}")
        with self._server() as server:
            trial = attempt(trial, kept.stem, self.folder, server, reference, draw)
            while not trial.hit and trial.completed:  # it was over before: another moment
                [trial] = plan(1, self.arguments.steps, step_s, [trial.kind], draw)
                trial = attempt(trial, kept.stem, self.folder, server, reference, draw)
        kept.write_text(json.dumps(asdict(trial)))
        return trial

    @contextlib.contextmanager
    def _server(self) -> Iterator[RewardServer]:
        server = self._servers.get()
        try:
            yield server
        finally:
            self._servers.put(server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser)
    with tempfile.TemporaryDirectory(prefix="megarl-faults-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        done = Campaign(arguments, folder).run()
    print(json.dumps(summary(done), indent=1))


if __name__ == "__main__":
    main()
