"""What a checkpoint in memory costs the processor: CPU seconds for the 1.6 GB of SmolLM2-135M with its moments, by one process.

    python benchmarks/memory_copies.py --out benchmarks/results/memory_copies.json

Written in place, as `resources.spares` does it: straight from the model into pages that are there. And as it was done until
2026-11-30: copied in the process, written from there into new files in shared memory, with a checksum, those of two
checkpoints before removed. Seconds of processors are little changed by what else the machine does.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_writing import cpu_s
from measured_code import code_of
from workload import machine, publish, versions

from megarl.checkpoint.dist_writer import write_shards
from megarl.megatron.shards import ShardBox, Shards, host_memory
from megarl.options.elastic.node_memory import SHARED_MEMORY
from megarl.options.elastic.shared_file import SharedFile

TENSORS, ROWS, COLUMNS = 800, 128, 3906
SLOTS = 2
"""Checkpoints that are there at once."""


def measure(write: Callable[[int], int], repeats: int) -> dict[str, Any]:
    """Figures of `repeats` checkpoints, behind one into each slot; `write` makes one in a slot and answers its bytes."""
    for slot in range(SLOTS):
        write(slot)
    figures: dict[str, Any] = {"cpu_s": [], "wall_s": []}
    for number in range(repeats):
        began, wall = cpu_s(), time.perf_counter()
        figures["bytes"] = write(number % SLOTS)
        figures["cpu_s"].append(round(cpu_s() - began, 3))
        figures["wall_s"].append(round(time.perf_counter() - wall, 3))
    return figures | {f"median_{name}": statistics.median(figures[name]) for name in ("cpu_s", "wall_s")}


def in_place(shards: Shards, repeats: int) -> dict[str, Any]:
    """Figures of files that are written over."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        files = [SharedFile(Path(folder) / str(slot) / "__0_0.distcp") for slot in range(SLOTS)]
        return measure(lambda slot: files[slot].write(shards).copied_bytes, repeats)


def into_new_files(shards: Shards, repeats: int) -> dict[str, Any]:
    """Figures of a copy in the process, and of files that are written from it."""
    memory = host_memory(shards.nbytes)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:

        def write(slot: int) -> int:
            shutil.rmtree(Path(folder) / str(slot), ignore_errors=True)
            written = write_shards(shards.copied_into(memory), Path(folder) / str(slot))
            return sum(record.bytes for record in written.files.values())

        return measure(write, repeats)


def main() -> None:
    """Measure, write the JSON file and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (ROWS, COLUMNS)
    boxes = [ShardBox(f"weight.{number}", sizes, (0, 0), sizes, torch.randn(ROWS * COLUMNS)) for number in range(TENSORS)]
    shards = Shards(0, boxes, {}, None)
    figures = {
        "in place": in_place(shards, arguments.repeats),
        "copied, and into new files": into_new_files(shards, arguments.repeats),
    }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/memory_copies.py",
        "machine": machine(),
        "versions": versions(),
        "code": code_of("memory_copies"),
        **figures,
    }
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
