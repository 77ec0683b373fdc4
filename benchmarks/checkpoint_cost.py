"""What a checkpoint costs the training that goes on while it is written: SmolLM2-135M, the GRPO step of benchmarks/step.yaml.

    python benchmarks/checkpoint_cost.py --out benchmarks/results/checkpoint_cost.json [key=value …]

Steps come in cycles of three. The first ends with the begin of a checkpoint, which stops training (`blocked_s`) for as long as
it takes to copy weights and moments; the second shares the machine with the writing, checksums and fsync; the third is clean.
`added_s` is what the first two take longer than two clean ones, blocked time included: all that a checkpoint adds to a run.
`added_to_a_step` is that as a share of the clean step. `whole_after_s`: from the begin until the checkpoint is sealed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measured_code import code_of
from workload import PROMPTS, ROOT, machine, publish, versions, write_prompts

from megarl.config import Config, load_config
from megarl.core.steps import RlRun
from megarl.trainers.rl.train import open_run

WARMUP, CYCLE = 2, 3


def one_step(run: RlRun) -> None:
    """The loop's body in `megarl.core.loop` without evaluation, guards and saving."""
    with run.next_step():
        run.sync_weights()
        samples = run.generate()
        rewards = run.score(samples)
        for attempt in run.attempts():
            with attempt:
                batch = run.prepare(samples)
                run.estimate_advantages(batch, rewards)
                for rows in run.mini_batches(batch):
                    run.update(batch, rows)
    run.report(batch)


def measure(config: Config, cycles: int) -> dict[str, Any]:
    """Seconds of every step, and of what each checkpoint blocked."""
    walls, blocked, whole_after = [], [], []
    with open_run(config) as run:
        for _ in range(WARMUP + CYCLE * cycles):
            started = time.perf_counter()
            one_step(run)
            trained, began = time.perf_counter(), time.time()
            run.save_if_due()
            walls.append(time.perf_counter() - started)
            if run.saving.is_under_way:
                blocked.append(time.perf_counter() - trained)
                begun = began
            elif len(whole_after) < len(blocked):
                sealed = run.checkpoints.all()[-1] / "manifest.json"
                whole_after.append(sealed.stat().st_mtime - begun)
        size = sum(path.stat().st_size for path in run.checkpoints.all()[-1].rglob("*") if path.is_file())
    rows = [walls[start : start + CYCLE] for start in range(WARMUP, len(walls), CYCLE)]
    clean = statistics.median(row[2] for row in rows)
    added = statistics.median(row[0] + row[1] - 2 * clean for row in rows)
    return {
        "checkpoint_bytes": size,
        "clean_step_s": clean,
        "blocked_s": statistics.median(blocked),
        "blocked_share_of_a_step": statistics.median(blocked) / clean,
        "added_s": added,
        "added_to_a_step": added / clean,
        "whole_after_s": statistics.median(whole_after),
        "cycles_s": rows,
        "blocked_each_s": blocked,
        "whole_after_each_s": whole_after,
    }


def main() -> None:
    """Measure, write the JSON file and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of benchmarks/step.yaml")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--cycles", type=int, default=4, help="checkpoints that count")
    arguments = parser.parse_args()
    steps = WARMUP + CYCLE * arguments.cycles
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # on the disk that the repository is on: /tmp may be in memory
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, PROMPTS * steps)
        settings = [f"run.folder={folder}", f"run.steps={steps + 1}", f"run.save_every={CYCLE}", f"data.train.path={prompts}"]
        figures = measure(load_config(ROOT / "benchmarks/step.yaml", [*settings, *arguments.overrides]), arguments.cycles)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    result = {
        "date": now,
        "command": "python benchmarks/checkpoint_cost.py",
        "machine": machine(),
        "versions": versions(),
        "code": code_of("checkpoint_cost"),
        "overrides": arguments.overrides,
        **figures,
    }
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
