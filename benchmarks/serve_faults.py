"""Do clients of `megarl serve` notice more than a pause, whatever happens to its processes, its connections or themselves?

    make tiny-model
    python benchmarks/serve_faults.py --trials 40 --seed 0 --out benchmarks/results/faults_serve.json

A trial is the loop of a real client (the package `tinker`) over one or two models: passes, steps, samples, saved states, in a
layout of one or two ranks. At a random moment something is done to the server or the client. The trial is good if the loop
ends, and its losses, the log-probs of fixed rows, greedy samples and the downloaded adapters are those of an undisturbed loop
to the last bit. A client that was killed is begun again from the state that it saved last.

The file is written after every trial, and the same command with `--resume` does those that it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fault_runs import WarmWorkers
from measured_code import code_of
from serve_fault_runs import LAYOUTS, REFERENCE, STEPS, Client, Server, Warm
from serve_fault_trials import KINDS, TRIAL_S, Trial, attempt
from warm_servers import WarmSglang
from workload import machine, versions

from megarl.system.atomic_files import write_text_atomically

SNAPSHOT_EVERY_S = 1.0
NEEDS_ENGINES = {"engine", "actor"}
"""Words of kinds that the server without ranks and engines has nothing for; a rank that is lost is a signal to it."""
LOCKED_S = 150.0
"""For how long trials are begun under one lock."""


def plan(trials: int, kinds: list[str], layouts: list[str], draw: random.Random) -> list[Trial]:
    """Every kind in turn, on servers of every layout, half of them of one rank; trials of a layout follow each other."""
    weighted = [layout for layout in layouts for _ in range(1 if LAYOUTS.get(layout) else 2)]
    cells = [(weighted[number % len(weighted)], kinds[number % len(kinds)]) for number in range(trials)]
    draw.shuffle(cells)
    cells.sort(key=lambda cell: layouts.index(cell[0]))
    return [
        Trial(number, layout, kind, draw.choice((1, 2)), draw.randrange(STEPS), round(draw.random(), 3))
        for number, (layout, kind) in enumerate(cells)
    ]


def undisturbed(server: Server, folder: Path) -> list[dict[str, Any]]:
    """The loop over two models that nothing happens to."""
    client = Client(folder / f"undisturbed-{server.layout.replace('=', '')}", server.url, 2)
    ends_at = time.monotonic() + TRIAL_S
    while client.done is None:
        if client.failure or time.monotonic() > ends_at:
            raise SystemExit(f"the undisturbed loop failed: {client.failure}")
        time.sleep(0.1)
    return client.done


# --- all of them -----------------------------------------------------------------------------------------------------------


def summary(trials: list[Trial]) -> dict[str, object]:
    """Counts and times."""
    pauses = [trial.paused_s for trial in trials if trial.paused_s is not None]
    by_kind: dict[str, list[Trial]] = {}
    for trial in trials:
        by_kind.setdefault(trial.kind, []).append(trial)
    return {
        "trials": len(trials),
        "good": sum(trial.is_good for trial in trials),
        "completed": sum(trial.completed for trial in trials),
        "identical_losses": sum(trial.same_losses for trial in trials),
        "identical_log_probs": sum(trial.same_log_probs for trial in trials),
        "identical_samples": sum(trial.same_samples for trial in trials),
        "identical_adapters": sum(trial.same_adapters for trial in trials),
        "median_paused_s": statistics.median(pauses) if pauses else None,
        "longest_paused_s": max(pauses, default=None),
        "median_wall_s": statistics.median(trial.wall_s for trial in trials) if trials else None,
        "by_kind": {
            kind: {
                "trials": len(some),
                "good": sum(trial.is_good for trial in some),
                "median_paused_s": round(statistics.median([t.paused_s for t in some if t.paused_s is not None] or [0]), 2),
            }
            for kind, some in sorted(by_kind.items())
        },
        "by_layout": {
            layout: {"trials": len(some), "good": sum(trial.is_good for trial in some)}
            for layout in (*LAYOUTS, REFERENCE)
            if (some := [trial for trial in trials if trial.layout == layout])
        },
    }


def series(arguments: argparse.Namespace) -> dict[str, object]:
    """What the trials follow from."""
    return {name: getattr(arguments, name) for name in ("trials", "seed", "kinds", "layouts")}


def command_of(arguments: argparse.Namespace) -> str:
    """The command without what changes no trial."""
    layouts = " ".join(f'"{layout}"' for layout in arguments.layouts)
    return f"benchmarks/serve_faults.py --trials {arguments.trials} --seed {arguments.seed} --layouts {layouts}"


class Campaign:
    """The trials of one command; a server is started where there is none of the layout, or the last trial was bad."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.done: dict[int, Trial] = {}
        self.times: dict[str, float] = {}
        self._server: Server | None = None
        self._reference: list[dict[str, Any]] = []
        if arguments.resume and arguments.out.exists():
            written = json.loads(arguments.out.read_text())
            if written["series"] != series(arguments):
                raise SystemExit(f"{arguments.out} is of another series: {written['series']}")
            self.done = {one["number"]: Trial(**one) for one in written["trial"]}

    def run(self) -> None:
        """Do the trials that are not done."""
        arguments, ends_at = self.arguments, time.monotonic() + self.arguments.for_s
        planned = plan(arguments.trials, arguments.kinds, arguments.layouts, random.Random(arguments.seed))
        left = [trial for trial in planned if trial.number not in self.done]
        with contextlib.ExitStack() as stack:
            warm = None
            if arguments.layouts != [REFERENCE]:
                warm = Warm(stack.enter_context(WarmWorkers()), stack.enter_context(WarmSglang()))
                warm.workers.wait()
            stack.callback(self._end)
            while left and time.monotonic() < ends_at:
                with locked(arguments.lock):
                    self._serving(left[0].layout, warm)
                time.sleep(1.0)
                with locked(arguments.lock):
                    free_at = time.monotonic() + LOCKED_S
                    while left and time.monotonic() < min(ends_at, free_at):
                        self._one(left.pop(0), warm)
                time.sleep(1.0)

    def _one(self, trial: Trial, warm: Warm | None) -> None:
        server = self._serving(trial.layout, warm)
        draw = random.Random(f"{self.arguments.seed} {trial.number}")
        done = attempt(trial, server, self._reference, self.folder, draw)
        self.done[trial.number] = done
        good = sum(one.is_good for one in self.done.values())
        said = json.dumps({name: value for name, value in asdict(done).items() if name != "number"})
        print(f"{done.number} {'good' if done.is_good else 'BAD'} ({good} of {len(self.done)}) {said}", flush=True)
        self._write()
        if not done.is_good:
            self._end()

    def _serving(self, layout: str, warm: Warm | None) -> Server:
        if self._server is not None and self._server.layout != layout:
            self._end()
        if self._server is None:
            name = f"server-{layout.replace('=', '')}-{len(self.done)}"
            self._server = Server(self.folder / name, layout, warm, SNAPSHOT_EVERY_S)
            self.times[layout] = round(self._server.wait(), 1)
            began = time.monotonic()
            self._reference = undisturbed(self._server, self.folder)
            loop_s = time.monotonic() - began
            print(f"{layout}: the server starts in {self.times[layout]} s, the loop takes {loop_s:.1f} s", flush=True)
        self._server.see_to()
        self._server.wait()
        return self._server

    def _end(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _write(self) -> None:
        if self.arguments.out is not None:
            trials = [self.done[number] for number in sorted(self.done)]
            written = {
                "command": command_of(self.arguments),
                "series": series(self.arguments),
                "date": time.strftime("%Y-%m-%d"),
                "machine": machine(),
                "versions": versions(),
                "code": code_of("serve_faults"),
                "kinds": KINDS,
                "steps_of_a_loop": STEPS,
                "start_s": self.times,
                **summary(trials),
                "trial": [asdict(one) for one in trials],
            }
            self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.arguments.out, json.dumps(written, indent=1) + "\n")


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="such as 'kill rank'")
    parser.add_argument(
        "--layouts", nargs="+", choices=[*LAYOUTS, REFERENCE], default=list(LAYOUTS), help=f"{REFERENCE}: alone"
    )
    parser.add_argument("--for-s", type=float, default=float("inf"), metavar="S", help="begin none later than after so long")
    parser.add_argument(
        "--lock", type=Path, help="file that is locked while a trial is under way: other work has its turns between"
    )
    parser.add_argument("--keep", type=Path, help="folder that keeps servers and clients")
    parser.add_argument("--out", type=Path, help="JSON file to write, after every trial")
    parser.add_argument("--resume", action="store_true", help="do only the trials that --out lacks")
    arguments = parser.parse_args()
    if arguments.layouts == [REFERENCE]:
        arguments.kinds = [kind for kind in arguments.kinds if not NEEDS_ENGINES & {*kind.replace(",", "").split()}]
    elif REFERENCE in arguments.layouts:
        parser.error(f"--layouts {REFERENCE} stands alone")
    if arguments.resume and arguments.out is None:
        parser.error("--resume needs --out")
    return arguments


@contextlib.contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold the lock of a file, if there is one."""
    if file is None:
        yield
        return
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="megarl-serve-faults-") as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = arguments_of(parser)
    with _folder(arguments.keep) as folder:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are ended too
        campaign = Campaign(arguments, folder)
        campaign.run()
    print(json.dumps(summary([*campaign.done.values()]), indent=1))


if __name__ == "__main__":
    main()
