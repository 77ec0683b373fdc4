"""Does a model that hears learn: spoken digits by GRPO, judged on voices that it never heard.

    make tiny-hearing && python benchmarks/learning_to_hear.py --out benchmarks/results/learning_to_hear.json

The runs are `megarl train` of examples/hearing/digits.yaml with the embedded engine and one rank, one for each seed. They need
Debian's package espeak-ng. Writes the JSON file after every run and leaves out runs that are in it already, and prints the
accuracies.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from learning_to_see import call, outcome
from measured_code import code_of
from workload import machine, versions

CONFIG = "examples/hearing/digits.yaml"
RUNS: dict[str, list[str]] = {"spoken digits, GRPO": [], "spoken digits, GRPO, tower frozen": ["policy.freeze=[vision]"]}
"""What is set over the config."""


def learn(name: str, seed: int) -> dict[str, Any]:
    """One run: its reward at every step, its held-out accuracies by step, its gates, and the median seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.folder={folder}", f"run.seed={seed}", "run.name=run", *RUNS[name]]
        call([sys.executable, "-m", "megarl", "train", CONFIG, *settings])
        return outcome(name, seed, Path(folder, "run"))


def main() -> None:
    """Run what is missing, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("learning_to_hear.json"), help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    runs = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    for seed in range(arguments.seeds):
        for name in RUNS:
            if any((run["name"], run["seed"]) == (name, seed) for run in runs):
                continue
            runs.append(learn(name, seed))
            setup = {"machine": machine(), "versions": versions(), "code": code_of("learning_to_hear")}
            arguments.out.write_text(json.dumps(setup | {"runs": runs}) + "\n")
            print(name, seed, runs[-1]["held_out_accuracy"], flush=True)


if __name__ == "__main__":
    main()
