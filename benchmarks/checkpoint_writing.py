"""What writing a checkpoint costs the processor: CPU seconds for the 1.6 GB of SmolLM2-135M with its moments, by one process.

    python benchmarks/checkpoint_writing.py --out benchmarks/results/checkpoint_writing.json

Once past the page cache, as megarl does where the file system can, and once through it. Each is written into a new folder, and
the one before is removed afterwards, as in a run. `machine_kernel_s`: the kernel's time on all cores meanwhile, in which the
threads that bring pages to the disk count, and whatever else the machine did.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measured_code import code_of
from workload import ROOT, machine, publish, versions

from megarl.checkpoint.dist_writer import write_shards
from megarl.megatron.shards import ShardBox, Shards

TENSORS, ROWS, COLUMNS = 100, 1024, 3906
WAYS = {"past the page cache": os.O_DIRECT, "through the page cache": 0}


def kernel_s() -> float:
    """Seconds that all cores spent in the kernel, interrupts included, since the machine started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (ticks[2] + ticks[5] + ticks[6]) / os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(shards: Shards, folder: Path, repeats: int) -> dict[str, Any]:
    """Figures of `repeats` checkpoints, each way in turn."""
    figures: dict[str, Any] = {way: {"cpu_s": [], "wall_s": [], "machine_kernel_s": []} for way in WAYS}
    before: Path | None = None
    for number in range(repeats):
        for way, flag in WAYS.items():
            os.sync()
            at = folder / f"{number}-{flag}"
            began, wall, kernel = cpu_s(), time.perf_counter(), kernel_s()
            with mock.patch.object(os, "O_DIRECT", flag):
                write_shards(shards, at)
            figures[way]["cpu_s"].append(round(cpu_s() - began, 3))
            figures[way]["wall_s"].append(round(time.perf_counter() - wall, 3))
            figures[way]["machine_kernel_s"].append(round(kernel_s() - kernel, 3))
            if before is not None:
                shutil.rmtree(before)
            before = at
    for of_way in figures.values():
        of_way |= {f"median_{name}": statistics.median(values) for name, values in list(of_way.items())}
    return figures


def main() -> None:
    """Measure, write the JSON file and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    sizes = (ROWS, COLUMNS)
    boxes = [ShardBox(f"weight.{number}", sizes, (0, 0), sizes, torch.randn(ROWS * COLUMNS)) for number in range(TENSORS)]
    shards = Shards(0, boxes, {}, None)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # on the disk that the repository is on: /tmp may be in memory
        figures = measure(shards, Path(folder), arguments.repeats)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/checkpoint_writing.py",
        "machine": machine(),
        "versions": versions(),
        "code": code_of("checkpoint_writing"),
        "checkpoint_bytes": shards.nbytes,
        **figures,
    }
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
