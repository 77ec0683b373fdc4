"""Does a run survive whatever happens to its processes? A tiny real run per trial, hit once at a random moment.

    make tiny-model tiny-calculator tiny-vision
    python benchmarks/faults.py --trials 100 --seed 0 --at-once 2 --out benchmarks/results/faults.json

A trial is good if the run completes, no prompt was lost or trained on twice, the samples and the final parameters are those of
the undisturbed run to the last bit (in runs whose samples do not depend on the clock), and no process of it is left. Runs over
nodes need root, for network namespaces. `--at-once 2` has two under way at a time, since much of a
trial is waiting: for processes to start, or for a deadline. The file is written after every trial, and the same command with
`--resume` does those that it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from fault_runs import FAMILIES, Place, RewardServer, WarmWorkers
from fault_trials import DEEDS, KINDS, TARGETS, Reference, Trial, attempt, undisturbed
from measured_code import code_of
from workload import machine, versions

from megarl.system.atomic_files import write_text_atomically


def plan(trials: int, kinds: list[tuple[str, str]], references: Mapping[str, Reference], draw: random.Random) -> list[Trial]:
    """Every kind of every family in turn, in a random order, each at a moment drawn over the start and all steps."""
    order = [kinds[number % len(kinds)] for number in range(trials)]
    draw.shuffle(order)
    return [moment(Trial(number, family, kind, 0, 0.0), references, draw) for number, (family, kind) in enumerate(order)]


def moment(trial: Trial, references: Mapping[str, Reference], draw: random.Random) -> Trial:
    """The trial at another moment: some seconds into the start, or into a step."""
    reference = references[trial.family]
    after = draw.randrange(reference.steps)
    delay_s = draw.random() * (reference.step_s if after else reference.start_s)
    return Trial(trial.number, trial.family, trial.kind, after, round(delay_s, 3))


def summary(trials: list[Trial]) -> dict[str, object]:
    """Counts and times over the trials."""
    times = [trial.recovered_s for trial in trials if trial.recovered_s is not None and trial.hit]
    by_kind = defaultdict(list)
    for trial in trials:
        by_kind[f"{trial.family}: {trial.kind}"].append(trial)
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
        "median_wall_s": statistics.median(trial.wall_s for trial in trials),
        "median_cpu_s": statistics.median(trial.cpu_s for trial in trials),
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


def report(done: list[Trial], references: Mapping[str, Reference], arguments: argparse.Namespace) -> dict[str, object]:
    """What is written: how it was measured, the summary, and every trial."""
    return {
        "command": " ".join(["benchmarks/faults.py", *sys.argv[1:]]),
        "series": series(arguments),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "code": code_of("faults"),
        "deeds": {deed: words for deed, (_, words) in DEEDS.items()},
        "targets": TARGETS,
        "families": {name: FAMILIES[name] for name in references},
        "undisturbed_start_s": {name: round(one.start_s, 1) for name, one in references.items()},
        "undisturbed_step_s": {name: round(one.step_s, 3) for name, one in references.items()},
        **summary(done),
        "trial": [asdict(one) for one in done],
    }


def series(arguments: argparse.Namespace) -> dict[str, object]:
    """What the trials follow from, but for their moments, which are parts of what steps take."""
    return {name: getattr(arguments, name) for name in ("trials", "seed", "steps", "families", "kinds")}


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    every = sorted({kind for kinds in KINDS.values() for kind in kinds})
    parser.add_argument("--trials", type=int, default=sum(map(len, KINDS.values())))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--families", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of runs; default: all")
    parser.add_argument("--kinds", nargs="+", choices=every, default=every, metavar="KIND", help="such as 'kill rank'")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trials under way at the same time")
    parser.add_argument("--for-s", type=float, default=float("inf"), metavar="S", help="begin none later than after so long")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every trial")
    parser.add_argument("--resume", action="store_true", help="do only the trials that --out lacks")
    arguments = parser.parse_args()
    if arguments.resume and arguments.out is None:
        parser.error("--resume needs --out")
    return arguments


def earlier(arguments: argparse.Namespace) -> dict[int, Trial]:
    """The trials that an earlier command of the same series has done, by their numbers."""
    if not arguments.resume or not arguments.out.exists():
        return {}
    written = json.loads(arguments.out.read_text())
    if written["series"] != series(arguments):
        raise SystemExit(f"{arguments.out} is of another series: {written['series']}")
    return {one["number"]: Trial(**one) for one in written["trial"]}


class Campaign:
    """The trials of one command, each in a place of its own while it is under way."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self._done = earlier(arguments)
        self._references: dict[str, Reference] = {}
        self._places: queue.SimpleQueue[Place] = queue.SimpleQueue()
        self._ends_at = time.monotonic() + arguments.for_s

    def run(self) -> list[Trial]:
        """All trials that are done by now, in the order planned."""
        arguments = self.arguments
        kinds = [(family, kind) for family in arguments.families for kind in KINDS[family] if kind in arguments.kinds]
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(arguments.at_once) as pool:
            places: list[Place] = []
            for number in range(arguments.at_once):
                workers = stack.enter_context(WarmWorkers())
                reward = RewardServer(self.folder, f"reward-{number}")
                stack.callback(reward.stop)
                places.append(Place(self.folder, reward, workers))
            for place in places:
                place.workers.wait()  # else the first run would seem to start slowly
                self._places.put(place)
            families = [family for family in FAMILIES if family in {family for family, _ in kinds}]
            self._references = dict(zip(families, pool.map(self._undisturbed, families), strict=True))
            planned = plan(arguments.trials, kinds, self._references, random.Random(arguments.seed))
            begun = [pool.submit(self._one, trial) for trial in planned if trial.number not in self._done]
            for future in as_completed(begun):
                trial = future.result()
                if trial is None:
                    continue
                self._done[trial.number] = trial
                good = sum(one.is_good for one in self._done.values())
                said = json.dumps({name: value for name, value in asdict(trial).items() if name != "number"})
                print(f"{trial.number} {'good' if trial.is_good else 'BAD'} ({good} of {len(self._done)}) {said}", flush=True)
                self._write()
        return self._in_order()

    def _in_order(self) -> list[Trial]:
        return [self._done[number] for number in sorted(self._done)]

    def _write(self) -> None:
        if self.arguments.out is not None:
            self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
            written = report(self._in_order(), self._references, self.arguments)
            write_text_atomically(self.arguments.out, json.dumps(written, indent=1) + "\n")

    def _undisturbed(self, family: str) -> Reference:
        with self._place() as place:
            found = undisturbed(place, family, self.arguments.steps)
        print(f"undisturbed, {family}: {found.start_s:.1f} s to the first step, then {found.step_s:.2f} s a step", flush=True)
        return found

    def _one(self, trial: Trial) -> Trial | None:
        """The trial, done; None: there is no time for it."""
        if time.monotonic() > self._ends_at:
            return None
        draw = random.Random(f"{self.arguments.seed} {trial.number}")
        with self._place() as place:
            while True:
                trial = attempt(trial, place, self._references[trial.family], draw)
                if trial.hit or not trial.completed:
                    return trial
                trial = moment(trial, self._references, draw)  # it was over before

    @contextlib.contextmanager
    def _place(self) -> Iterator[Place]:
        place = self._places.get()
        try:
            yield place
        finally:
            self._places.put(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser)
    with tempfile.TemporaryDirectory(prefix="megarl-faults-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of thousands of processes would compile what it imports
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder / "bytecode"))
        done = Campaign(arguments, folder).run()
    print(json.dumps(summary(done), indent=1))


if __name__ == "__main__":
    main()
