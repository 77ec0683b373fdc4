"""Is every damage to a checkpoint seen, and the one before used? A real run's newest checkpoint, damaged file by file.

    python benchmarks/corruption.py --out benchmarks/results/corruption.json

Trains examples/tiny/grpo.yaml (after `make tiny-model`) for two steps, each saved. Every file of the newest checkpoint is then
truncated at 20 places and has one bit flipped at 200 (at every byte, if it has fewer); each time `run.resume=auto` must pass
the checkpoint over, name the file and choose the one before. At last the run is resumed for real over a damaged checkpoint.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from measured_code import code_of
from workload import ROOT, machine, publish, versions

from megarl.runs.run_checkpoint import CheckpointFolder

TRUNCATIONS, FLIPS = 20, 200


def train(folder: Path, steps: int, resume: str) -> str:
    """Run the example in `folder` to `steps` steps; returns what it printed."""
    command = [
        str(Path(sys.executable).with_name("megarl")),
        "train",
        str(ROOT / "examples/tiny/grpo.yaml"),
        f"run.folder={folder}",
    ]
    command += [f"run.steps={steps}", "run.save_every=1", f"run.resume={resume}", "rollout.prompts_per_step=8"]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


def damages(path: Path, draw: random.Random) -> list[tuple[str, int]]:
    """What is done to a file, and where."""
    size = path.stat().st_size
    flips = draw.sample(range(size), min(FLIPS, size))
    return [("truncated", draw.randrange(size)) for _ in range(TRUNCATIONS) if size] + [("flipped", place) for place in flips]


def damage_all(checkpoints: CheckpointFolder) -> Counter[str]:
    """Damage every file of the newest checkpoint in every way, one at a time."""
    before, newest = checkpoints.all()[-2:]
    draw, counts = random.Random(0), Counter[str]()
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        size = path.stat().st_size
        for what, place in damages(path, draw):
            with path.open("r+b") as file:
                file.seek(place)
                kept = file.read(1 if what == "flipped" else -1)
                file.seek(place)
                if what == "flipped":
                    file.write(bytes([kept[0] ^ 1 << draw.randrange(8)]))
                else:
                    file.truncate()
            chosen = checkpoints.resolve("auto")
            counts[what] += 1
            counts["detected"] += len(checkpoints.damaged) == 1 and path.name in checkpoints.damaged[0]
            counts["recovered"] += chosen == before
            with path.open("r+b") as file:
                file.seek(place)
                file.write(kept)
            assert path.stat().st_size == size
        counts["files"] += 1
    assert checkpoints.resolve("auto") == newest, "the checkpoint was not put together again"
    return counts


def main() -> None:
    """Train, damage, count, resume; write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        train(Path(work), 2, "never")
        checkpoints = CheckpointFolder(Path(work) / "tiny-grpo" / "checkpoints")
        started = time.perf_counter()
        counts = damage_all(checkpoints)
        seconds = time.perf_counter() - started
        (checkpoints.all()[-1] / "state.json").write_text("{}")
        said = train(Path(work), 3, "auto")
        resumed = "a checkpoint was passed over" in said and [path.name for path in checkpoints.all()][-1] == "step_000003"
    trials = counts["truncated"] + counts["flipped"]
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/corruption.py",
        "machine": machine(),
        "versions": versions(),
        "code": code_of("corruption"),
        "trials": trials,
        **counts,
        "resumed_over_a_damaged_one": resumed,
        "seconds": round(seconds, 1),
    }
    publish(report, arguments.out)
    if not (resumed and trials == counts["detected"] == counts["recovered"]):
        sys.exit("some damage was not seen")


if __name__ == "__main__":
    main()
