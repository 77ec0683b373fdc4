"""What the loss of a rank costs a run that replaces it, and what keeping its state in memory costs a step.

    python benchmarks/replaced_ranks.py --out benchmarks/results/replaced_ranks.json

Three runs of the same work: without `resources.spares`, with it, and with it while a rank of the policy is killed in the middle
of an update, once or more. Seconds are those from the kill until the update is begun again. With the embedded engine the
numbers of the steps must be those of the runs that were left in peace; SGLang samples otherwise in each run. What copies take
is also told in seconds of processors, against those of all processes of the run in a step: other work changes these little.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.measured_code import code_of  # noqa: E402
from benchmarks.workload import machine, versions, write_prompts  # noqa: E402
from megarl.config import load_config  # noqa: E402
from megarl.observe import read_metrics  # noqa: E402
from megarl.runs.training_side import POLICY  # noqa: E402
from megarl.trainers.rl.train import train  # noqa: E402
from megarl.workers.roles import Roles  # noqa: E402

EXACT = ("policy/grad_norm", "reward/mean")
"""Metrics of a step that a loss must not change."""
COPIES = ("copied_bytes", "sent_bytes", "copies_cpu_s")
"""Metrics of what keeping the state in memory takes."""
DELAY_S = 0.3
"""From the begin of an update to the kill."""
START_UPDATE = Roles.start_update


class Kills:
    """Kills a rank of the policy in some updates, and takes the time until one is begun again."""

    def __init__(self, updates: Sequence[int], rank: int) -> None:
        self._updates, self._rank, self._calls = {*updates}, rank, count(1)
        self._killed_at: float | None = None
        self.cpu_s: list[float] = []
        """Seconds of processors that all processes of the run have taken, at the begin of each update."""
        self.seconds: list[float] = []

    def start_update(self, roles: Roles, *arguments: Any, **named: Any) -> Any:
        """`Roles.start_update`, behind which the rank is killed if it is its turn."""
        if self._killed_at is not None:
            self.seconds.append(time.perf_counter() - self._killed_at)
            self._killed_at = None
        self.cpu_s.append(cpu_seconds())
        started = START_UPDATE(roles, *arguments, **named)
        if next(self._calls) in self._updates:
            time.sleep(DELAY_S)
            group: Any = roles.groups[POLICY]
            os.kill(group.host_and_pid[self._rank][1], signal.SIGKILL)
            self._killed_at = time.perf_counter()
        return started


def cpu_seconds() -> float:
    """Seconds of processors that this process and those below it have taken."""
    own, taken = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            taken += times.user + times.system
    return taken


def measure(given: argparse.Namespace, name: str, work: Path, kills: Kills, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of the steps of a run."""
    of_run = {"run.name": name, "run.folder": work, "run.steps": given.steps, "data.train.path": work / "prompts.jsonl"}
    fields = [*(f"{field}={value}" for field, value in of_run.items()), "run.eval_before=false", *given.overrides, *overrides]
    config = load_config(given.config, fields)
    Roles.start_update = lambda *arguments, **named: kills.start_update(*arguments, **named)  # type: ignore[method-assign]
    try:
        train(config)
    finally:
        Roles.start_update = START_UPDATE  # type: ignore[method-assign]
    return [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if "time/step_s" in row]


def _median_step(at_updates: Sequence[float]) -> float:
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(at_updates))


def main() -> None:
    """Measure and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("replaced_ranks.json"), help="JSON file to write")
    parser.add_argument("--config", type=Path, default=ROOT / "benchmarks/step.yaml")
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--kills", type=int, nargs="+", default=[3, 5], help="updates in which a rank is killed")
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--rank", type=int, default=1, help="the rank that is killed")
    parser.add_argument("overrides", nargs="*", help="fields of the config")
    given = parser.parse_args()
    steps: dict[str, list[dict[str, Any]]] = {}
    kills, calm, left_alone = Kills(given.kills, given.rank), Kills([], 0), Kills([], 0)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_prompts(work / "prompts.jsonl", 64)
        spares = f"resources.spares={given.spares}"
        steps["without"] = measure(given, "without", work, left_alone)
        steps["with"] = measure(given, "with", work, calm, spares)
        steps["killed"] = measure(given, "killed", work, kills, spares)
    same = {name: [[row[key] for key in EXACT] for row in rows] for name, rows in steps.items()}
    seconds = {name: [row["time/step_s"] for row in rows[1:]] for name, rows in steps.items()}
    middle = {name: statistics.median(of_run) for name, of_run in seconds.items()}
    copies = {name: statistics.median(row[f"recovery/{name}"] for row in steps["with"][1:]) for name in COPIES}
    step_cpu_s = {"without": _median_step(left_alone.cpu_s), "with": _median_step(calm.cpu_s)}
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "code": code_of("replaced_ranks"),
        "machine": machine(),
        "versions": versions(),
        "setup": {"steps": given.steps, "kills": given.kills, "spares": given.spares, "config": given.config.name},
        "lost_to_resumed_s": kills.seconds,
        "steps_s": seconds,
        "step_cpu_s": step_cpu_s,
        "copies": copies,
        "copies_share_of_cpu": copies["copies_cpu_s"] / step_cpu_s["with"],
        "memory_cost": middle["with"] / middle["without"] - 1,
        "steps_lost": given.steps - len(steps["killed"]),
        "numbers_equal": same["killed"] == same["with"] == same["without"],
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {name: result[name] for name in ("lost_to_resumed_s", "memory_cost", "copies_share_of_cpu", "numbers_equal")}
        )
    )


if __name__ == "__main__":
    main()
