"""Does a run survive whatever happens to its processes? A tiny real run per trial, hit once at a random moment.

    make tiny-model
    python benchmarks/faults.py --trials 100 --seed 0 --out benchmarks/results/faults.json

A trial is good if the run completes, no prompt was lost or trained on twice, the samples and the final parameters are those of
the undisturbed run to the last bit, and no process of it is left. Half a minute a trial where a core is free for each rank.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from fault_trials import DEEDS, KINDS, TARGETS, RewardServer, Trial, attempt, undisturbed
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
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), help="such as 'kill rank'; default: all")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs; the same command goes on where it was stopped")
    parser.add_argument("--at-most", type=int, metavar="N", help="stop after so many further trials")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every trial")
    arguments = parser.parse_args()
    unknown = set(arguments.kinds) - set(KINDS)
    if unknown:
        parser.error(f"--kinds {', '.join(sorted(unknown))}: may be {', '.join(KINDS)}")
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser)
    done: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="megarl-faults-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        reward, further = RewardServer(folder), 0
        try:
            reference, step_s = undisturbed(folder, reward, arguments.steps)
            planned = plan(arguments.trials, arguments.steps, step_s, arguments.kinds, random.Random(arguments.seed))
            print(f"undisturbed: {step_s:.2f} s a step", flush=True)
            for number, trial in enumerate(planned):
                kept = folder / f"trial-{number:03d}.json"
                if kept.exists():
                    done.append(Trial(**json.loads(kept.read_text())))
                    continue
                if further == arguments.at_most:
                    break
                further += 1
                draw = random.Random(f"{arguments.seed} {number}")
                trial = attempt(trial, kept.stem, folder, reward, reference, draw)
                while not trial.hit and trial.completed:  # it was over before: another moment
                    [trial] = plan(1, arguments.steps, step_s, [trial.kind], draw)
                    trial = attempt(trial, kept.stem, folder, reward, reference, draw)
                done.append(trial)
                kept.write_text(json.dumps(asdict(trial)))
                print(f"{number + 1}/{len(planned)} {'good' if trial.is_good else 'BAD '} {asdict(trial)}", flush=True)
                if arguments.out:
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    command = " ".join(["benchmarks/faults.py", *sys.argv[1:]])
                    arguments.out.write_text(json.dumps(report(done, step_s, command), indent=1) + "\n")
        finally:
            reward.stop()
    print(json.dumps(summary(done), indent=1))


if __name__ == "__main__":
    main()
