"""Do supervised and preference loops by the API learn what `megarl sft` and `megarl preference` learn: recipes of the cookbook
beside the same algorithms.

    make cookbook
    python benchmarks/served_supervised.py --out benchmarks/results/served_supervised.json

`sl_loop` and `preference.dpo` run in the cookbook's own environment, unchanged, against one `megarl serve`. Their partners,
served_supervised.yaml and served_preference.yaml, begin with the adapters that the server drew and get the same rows in the
same order. Nothing is sampled, so that both sides' losses are compared step by step. Both end as PEFT folders, which
transformers and PEFT judge by rows that neither was trained on (served_supervised_judge.py). Rows are others for each seed.

Runs that the file has already are kept, each with its date: to repeat all, name a file that is not there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import served_supervised_judge as judge
from measured_code import code_of
from served_recipes import BASE, COOKBOOK, SMALL, config_of, cookbook_versions, environment, serving, why_not
from workload import ROOT, machine, versions

sys.path.insert(0, str(ROOT))

from tests.themes.e2e.processes import outside_ray

ROWS = 16
"""Rows or pairs of a step."""
SERVED, TRAINED = SIDES = "served", "trained"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "megarl"]
"""Partners are one process: they sample nothing, and need no Ray."""
TIMEOUT_S = 900
SHOWN_STEPS = 4
"""Steps of a column of the table of losses."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """A recipe's module below tinker_cookbook.recipes with its arguments and its figures, and its partner."""

    module: str
    arguments: str
    figures: dict[str, str]
    """By what a step of either side has here, the name that the recipe has for it."""
    shuffles: int
    """How often the recipe shuffles its rows, each time with seed 0."""
    command: str
    config: str
    rows: Callable[..., Rows]
    judged: Callable[..., dict[str, float]]


COMPARED = {
    "sl_loop": Method(
        "sl_loop", f"lora_rank=32 learning_rate=3e-3 batch_size={ROWS} save_every=0",
        {"loss": "train_mean_nll", "grad_norm": "grad_norm"}, 1,
        "sft", "benchmarks/served_supervised.yaml", judge.conversations, judge.judged_answers,
    ),
    "preference.dpo": Method(
        "preference.dpo.train", f"dataset=hhh learning_rate=1e-3 batch_size={ROWS}",
        {"loss": "dpo_loss", "accuracy": "accuracy"}, 2,
        "preference", "benchmarks/served_preference.yaml", judge.preferences, judge.judged_pairs,
    ),
}  # fmt: skip


def command_of(method: Method, log: str) -> list[str]:
    """Arguments of the cookbook's python for a recipe."""
    return [
        "-m",
        f"tinker_cookbook.recipes.{method.module}",
        f"model_name={BASE}",
        f"log_path={log}",
        *method.arguments.split(),
    ]


def write_inputs(folder: Path, model: Path, number: int, steps: int) -> None:
    """What the recipes find by the hub's names in the folder in which they work: the tokenizer and the rows of a seed."""
    shutil.copytree(model, folder / BASE, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    train, test = (judge.conversations(count, number, kept=kept) for count, kept in ((steps * ROWS, False), (ROWS, True)))
    judge.write_data_set(folder / judge.NO_ROBOTS, train, test)
    pairs = (judge.preferences(count, number, kept=kept) for count, kept in ((steps * ROWS, False), (ROWS, True)))
    judge.write_data_set(folder / judge.PAIRS, *([judge.as_dialogue(row) for row in rows] for rows in pairs))


def serve_recipe(url: str, work: Path, name: str, number: int, steps: int) -> dict[str, Any]:
    """One run of a recipe: its figures by step, the seed of its adapters, and where they are at the end."""
    method, folder = COMPARED[name], work / f"seed-{number}"
    write_inputs(folder, work / "model", number, steps)
    log = folder / "logs" / name
    shutil.rmtree(log, ignore_errors=True)
    run_logged([str(COOKBOOK / "bin/python"), *command_of(method, str(log))], folder, environment(url, folder), f"{name}.log")
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    of_steps = [line for line in lines if method.figures["loss"] in line]
    if len(of_steps) != steps:
        raise SystemExit(f"{name} took {len(of_steps)} steps in place of {steps}")
    last = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])["sampler_path"].removeprefix("tinker://")
    model, _, kept = last.partition("/")
    of_server = work / "runs/served/serve"
    made = (json.loads(path.read_text()) for path in (of_server / "training_runs").iterdir())
    (adapter,) = (of_server / "checkpoints" / model.replace(":", "=") / kept).rglob("adapter_config.json")
    figures = {here: [line[there] for line in of_steps] for here, there in method.figures.items()}
    return {"seed": next(one for one in made if one["id"] == model)["seed"], "adapter": str(adapter.parent)} | figures


def train_partner(work: Path, name: str, number: int, steps: int, seed: int) -> dict[str, Any]:
    """One run of the partner from the adapters that `seed` draws."""
    method, folder = COMPARED[name], work / f"seed-{number}"
    run, rows = f"{name}-partner", folder / f"{name}.jsonl"
    folder.mkdir(exist_ok=True)
    judge.write_rows(rows, judge.in_order(method.rows(steps * ROWS, number), method.shuffles))
    shutil.rmtree(folder / run, ignore_errors=True)
    command = [*TORCHRUN, method.command, str(ROOT / method.config), f"run.folder={folder}", f"run.name={run}"]
    command += [f"run.steps={steps}", f"run.seed={seed}", f"model.path={work / 'model'}"]
    run_logged([*command, f"data.train.path={rows}"], ROOT, outside_ray() | {"HF_HUB_OFFLINE": "1"}, str(folder / f"{run}.log"))
    lines = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
    of_steps = [line for line in lines if "train/loss" in line]
    figures = {here: [line[f"train/{here}"] for line in of_steps] for here in method.figures}
    return {"seed": seed, "adapter": str(folder / run / "model")} | figures


def run_logged(command: Sequence[str], folder: Path, env: dict[str, str], log: str) -> None:
    """Run a command in a folder; what it says is in `log` there, and its end in the error if it fails."""
    with (folder / log).open("w") as said:
        ended = subprocess.run(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{(folder / log).read_text()[-3000:]}")


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By recipe, over the seeds of which both sides are there: the largest differences of losses in a step and of what was
    judged, and the sides' means."""
    found: dict[str, Any] = {}
    for name in COMPARED:
        sides = {side: {run["number"]: run for run in runs if (run["recipe"], run["side"]) == (name, side)} for side in SIDES}
        pairs = [(run, sides[TRAINED][number]) for number, run in sides[SERVED].items() if number in sides[TRAINED]]
        if not pairs:
            continue
        of_step = max(largest(*(side["loss"] for side in pair)) for pair in pairs)
        kept = {what: [[side["held_out"][what] for side in pair] for pair in pairs] for what in ("loss", "accuracy")}
        means = {what: dict(zip(SIDES, map(mean, zip(*values, strict=True)), strict=True)) for what, values in kept.items()}
        differences = {what: largest(*zip(*values, strict=True)) for what, values in kept.items()}
        found[name] = {"seeds": len(pairs), "step_loss": of_step, "held_out": differences, "mean": means}
    return found


def largest(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference between two lists."""
    return max(abs(one - other) for one, other in zip(left, right, strict=True))


def table(found: dict[str, Any]) -> list[str]:
    """Markdown rows: what was judged of both ends by recipe and seed, and their steps' largest difference; – if missing."""
    lines = [
        "| recipe | seed | held-out loss by the API, nats | by `megarl` | accuracy by the API | by `megarl` |"
        " largest difference of a step's losses |",
        "|---|---|---|---|---|---|---|",
    ]
    by_side = {(run["recipe"], run["number"], run["side"]): run for run in found["runs"]}
    for name, number in dict.fromkeys((run["recipe"], run["number"]) for run in found["runs"]):
        sides = [by_side.get((name, number, side)) for side in SIDES]
        cells = [side and f"{side['held_out']['loss']:.5f}" for side in sides]
        cells += [side and f"{100 * side['held_out']['accuracy']:.1f} %" for side in sides]
        cells.append(None if None in sides else f"{largest(*(side['loss'] for side in sides if side)):.1e}")
        command = COMPARED[name].command
        lines.append(f"| `{name}`, `megarl {command}` | {number + 1} | {' | '.join(cell or '–' for cell in cells)} |")
    return lines


def curve(found: dict[str, Any]) -> list[str]:
    """Markdown rows: the mean loss of some steps at a time, over the seeds of a side."""
    starts = range(0, found["setup"]["steps"], SHOWN_STEPS)
    lines = [
        f"| steps | {' | '.join(f'{start + 1}–{start + SHOWN_STEPS}' for start in starts)} |",
        "|---" * (len(starts) + 1) + "|",
    ]
    for name, method in COMPARED.items():
        for side, words in ((SERVED, f"`{name}` by the API"), (TRAINED, f"`megarl {method.command}`")):
            curves = [run["loss"] for run in found["runs"] if (run["recipe"], run["side"]) == (name, side)]
            means = [mean(loss for one in curves for loss in one[start : start + SHOWN_STEPS]) for start in starts if curves]
            lines += [f"| {words} | {' | '.join(f'{value:.4f}' for value in means)} |"] if curves else []
    return lines


class Record:
    """The JSON file, which is written whenever a run has ended."""

    def __init__(self, path: Path, setup: dict[str, Any]) -> None:
        self.path, self.setup = path, setup
        self.runs: Rows = json.loads(path.read_text())["runs"] if path.exists() else []

    def get(self, side: str, name: str, number: int) -> dict[str, Any] | None:
        """The run of this side, recipe and seed that is there."""
        return next((run for run in self.runs if (run["side"], run["recipe"], run["number"]) == (side, name, number)), None)

    def add(self, run: dict[str, Any]) -> dict[str, Any]:
        """Add a run, write all and return it."""
        recipes = [*COMPARED]
        self.runs = sorted([*self.runs, run], key=lambda run: (recipes.index(run["recipe"]), run["number"], run["side"]))
        found = self.setup | {"runs": self.runs, "final": compared(self.runs)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found, indent=1) + "\n")
        return found


def measured(work: Path, side: str, name: str, number: int, kept: Rows, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A run, timed and judged by `kept` rows."""
    started = time.monotonic()
    found = run()
    seconds = time.monotonic() - started
    held_out = COMPARED[name].judged(work / "model", Path(found.pop("adapter")), kept)
    print(f"{name} {number} {side}: last loss {found['loss'][-1]:.5f}, held out {held_out}, {seconds:.0f} s", flush=True)
    which = {"recipe": name, "number": number, "side": side, "date": datetime.now(UTC).date().isoformat()}
    return which | {"seconds": seconds, "held_out": held_out} | found


def setup_of(arguments: argparse.Namespace, model: Path, kept: dict[str, Rows]) -> dict[str, Any]:
    """What the file says beside the runs."""
    steps = arguments.steps
    start, overrides = "torchrun --nproc-per-node 1 -m megarl", f"run.steps={steps} run.seed=SEED"
    return {
        "command": "python benchmarks/served_supervised.py",
        "recipes": {name: "python " + " ".join(command_of(method, "FOLDER")) for name, method in COMPARED.items()},
        "partners": {name: f"{start} {one.command} {one.config} {overrides}" for name, one in COMPARED.items()},
        "machine": machine(),
        "code": code_of("served_supervised"),
        "versions": versions() | cookbook_versions() | {"peft": version("peft")},
        "model": SMALL,
        "setup": {"steps": steps, "rows": ROWS, "held_out": arguments.kept, "dtype": "float32"},
        "start": {name: method.judged(model, None, kept[name]) for name, method in COMPARED.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/served-supervised", help="folder of the model and all runs")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=int, default=256, help="held-out conversations, and held-out pairs")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(reason)
    work, steps = arguments.work.resolve(), arguments.steps
    model = work / "model"
    work.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").exists():
        import recipe_model  # torch and transformers, which those who only read the figures need not load

        recipe_model.write_model(model)
    kept = {name: method.rows(arguments.kept, -1, kept=True) for name, method in COMPARED.items()}
    record = Record(arguments.out, setup_of(arguments, model, kept))
    every = [(name, number) for number in range(arguments.seeds) for name in COMPARED]
    if missing := [one for one in every if record.get(SERVED, *one) is None]:
        shutil.rmtree(work / "runs", ignore_errors=True)
        with serving(config_of(model, work), work) as url:
            for name, number in missing:
                record.add(
                    measured(work, SERVED, name, number, kept[name], partial(serve_recipe, url, work, name, number, steps))
                )
    for name, number in every:
        if (served := record.get(SERVED, name, number)) is not None and record.get(TRAINED, name, number) is None:
            partner = partial(train_partner, work, name, number, steps, served["seed"])
            record.add(measured(work, TRAINED, name, number, kept[name], partner))
    found = record.setup | {"runs": record.runs}
    print("\n".join([*table(found), "", *curve(found)]))


if __name__ == "__main__":
    main()
