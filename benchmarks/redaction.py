"""What it costs a run to leave secrets out of what it writes: CPU seconds, beside those of the whole step, in one real run.

    python benchmarks/redaction.py --out benchmarks/results/redaction.json

`examples/tiny/grpo.yaml` in this process, with all 512 samples of a step logged in place of 8: the most that a run can write.
What samples and progress lose is counted where it is called, by the clock of the calling thread, and a step by the CPU seconds
of all processes of the run, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from measured_code import code_of
from workload import ROOT, machine, publish, versions

from megarl.config import Config, load_any
from megarl.experience import samples_file
from megarl.observe import progress
from megarl.trainers.rl.train import train

LOGGED, BY_DEFAULT = 512, 8
"""`run.log_samples` of the run, and where nobody sets it."""


@dataclass
class Cost:
    """What calls took so far."""

    calls: int = 0
    characters: int = 0
    cpu_s: float = 0.0

    def of(self, redact: Callable[[str], str]) -> Callable[[str], str]:
        """The same function, which counts here."""

        def counting(text: str) -> str:
            began = time.thread_time()
            shown = redact(text)
            self.cpu_s += time.thread_time() - began
            self.calls += 1
            self.characters += len(text)
            return shown

        return counting


@dataclass(frozen=True)
class Moment:
    """CPU seconds so far: of redaction by what loses its secrets, and of all processes of the run."""

    redaction_s: dict[str, float]
    calls: dict[str, int]
    characters: dict[str, int]
    run_s: float


@contextmanager
def counted() -> Iterator[list[Moment]]:
    """A moment behind the samples of each step, while the block runs."""
    places = {"samples": (samples_file, "redacted_data"), "progress": (progress, "redacted")}
    before = {name: getattr(module, function) for name, (module, function) in places.items()}
    costs, moments, add = {name: Cost() for name in places}, list[Moment](), samples_file.SamplesFile.add

    def add_and_look(file: samples_file.SamplesFile, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        add(file, step, records)
        seconds = {name: cost.cpu_s for name, cost in costs.items()}
        calls = {name: cost.calls for name, cost in costs.items()}
        moments.append(Moment(seconds, calls, {name: cost.characters for name, cost in costs.items()}, cpu_of_all()))

    for name, (module, function) in places.items():
        setattr(module, function, costs[name].of(before[name]))
    samples_file.SamplesFile.add = add_and_look  # type: ignore[method-assign, assignment]
    try:
        yield moments
    finally:
        samples_file.SamplesFile.add = add  # type: ignore[method-assign]
        for name, (module, function) in places.items():
            setattr(module, function, before[name])


def cpu_of_all() -> float:
    """CPU seconds of this process and of all that it has started and are there."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def one_run(steps: int, folder: Path, model: str) -> dict[str, Any]:
    """Train `steps` steps behind a first one, which imports and compiles, and return what they and redaction took."""
    overrides = [f"run.folder={folder}", f"run.steps={steps + 1}", f"run.log_samples={LOGGED}", f"model.path={model}"]
    config = load_any(ROOT / "examples/tiny/grpo.yaml", [*overrides, "data.eval=null"])
    assert isinstance(config, Config)
    with counted() as moments:
        train(config)
    first, last = moments[0], moments[-1]
    cpu_s, calls, characters = (
        {name: getattr(last, part)[name] - getattr(first, part)[name] for name in ("samples", "progress")}
        for part in ("redaction_s", "calls", "characters")
    )
    run_s, cores = last.run_s - first.run_s, len(os.sched_getaffinity(0))
    by_default_s = cpu_s["samples"] * BY_DEFAULT / LOGGED + cpu_s["progress"]
    return {
        "log_samples": LOGGED, "steps": len(moments) - 1, "calls": calls, "characters": characters, "cpu_s": cpu_s,
        "cpu_s_of_all_processes": run_s, "ns_per_character": 1e9 * cpu_s["samples"] / characters["samples"],
        "share_of_cpu": sum(cpu_s.values()) / run_s,
        # of a step that keeps every core busy all the time: the largest that it can be
        "share_of_a_step": cores * sum(cpu_s.values()) / run_s, "share_by_default": cores * by_default_s / run_s,
    }  # fmt: skip


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps that count (default: 8)")
    parser.add_argument("--model", default=str(ROOT / "models/tiny-arithmetic"), help="folder of the tiny model")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megarl-redaction-") as folder:
        run = one_run(arguments.steps, Path(folder), arguments.model)
    publish({"machine": machine(), "code": code_of("redaction"), "versions": versions(), "run": run}, arguments.out)


if __name__ == "__main__":
    main()
