"""Does a loop by the API learn what `megarl train` learns: the cookbook's arithmetic recipe beside the same algorithm.

    python benchmarks/served_curves.py --cookbook VENV/bin/python --out benchmarks/results/served_curves.json

VENV has `tinker` and `tinker-cookbook`; the recipe runs there, unchanged, against a `megarl serve` of this environment
(served_curves_server.yaml). Its partner is `megarl train benchmarks/served_curves.yaml`, which begins with the adapters that
the server drew and is asked the same sums in the same order. Both end as PEFT folders, which transformers and PEFT judge by
many answers to sums that were not asked. The base is a tiny Llama (served_curves_model.py), made once in `--work`.

Runs that the file has already are kept, each with its date: to repeat all, name a file that is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from measured_code import code_of
from served_curves_judge import MAX_TOKENS, Sum, held_out, judged, sums_of_step
from served_curves_model import make, prompt
from workload import ROOT, machine, versions

BASE = "Qwen/Qwen3-4B-Instruct-2507"
"""The name by which the recipe asks for the tiny model: the cookbook takes names that it knows."""
PROMPTS, SAMPLES, RANK, LR = 16, 4, 16, 1e-3
LAST_STEPS = 5
SERVED, TRAINED = "served", "trained"
TIMEOUT_S = 900


def environment(**more: str) -> dict[str, str]:
    """This process's, without the hub."""
    return os.environ | {"HF_HUB_OFFLINE": "1"} | more


def cache_of_hub(folder: Path, model: Path) -> Path:
    """A cache of the hub in which `BASE` has the tiny model's tokenizer, and nothing else is."""
    entry = folder / "hub" / f"models--{BASE.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True, exist_ok=True)
    (entry / "refs/main").write_text("tiny")
    (entry / "snapshots/tiny").mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, entry / "snapshots/tiny" / name)
    return folder


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[str]:
    """The URL of a server that is up until the block ends; its run is in `folder`."""
    log = folder / "serve.log"
    command = [sys.executable, "-m", "megarl", "serve", str(ROOT / "benchmarks/served_curves_server.yaml")]
    command += [f"model.path={model}", f"run.folder={folder}"]
    with log.open("w") as said:
        process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
    try:
        ends_at = time.monotonic() + TIMEOUT_S
        while not (up := re.search(r"serving .* at (http://\S+):", log.read_text())):
            if process.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield up[1]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=120)
        finally:
            process.kill()


def recipe_command(url: str, folder: Path, steps: int) -> list[str]:
    """Arguments of the cookbook's python for its recipe."""
    values = {
        "env": "arithmetic", "model_name": BASE, "renderer_name": "qwen3_instruct", "loss_fn": "importance_sampling",
        "groups_per_batch": PROMPTS, "group_size": SAMPLES, "learning_rate": LR, "lora_rank": RANK, "max_tokens": MAX_TOKENS,
        "max_steps": steps, "eval_every": 0, "save_every": 0, "base_url": url, "log_path": folder,
        "behavior_if_log_dir_exists": "delete",
    }  # fmt: skip
    return ["-m", "tinker_cookbook.recipes.math_rl.train", *(f"{name}={value}" for name, value in values.items())]


def serve_recipe(url: str, cookbook: Path, work: Path, name: str, steps: int) -> dict[str, Any]:
    """One run of the recipe: its curves, the seed of its adapters, and where they are at the end."""
    folder = work / name
    keys = {"HF_HOME": str(work / "cache"), "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "PYTHONPATH": ""}
    with (work / f"{name}.log").open("w") as said:
        command = [str(cookbook), *recipe_command(url, folder, steps)]
        subprocess.run(command, env=environment(**keys), stdout=said, stderr=subprocess.STDOUT, check=True, timeout=TIMEOUT_S)
    check_sums(folder, steps)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "env/all/reward/total" in line]
    last = json.loads((folder / "checkpoints.jsonl").read_text().splitlines()[-1])["sampler_path"].removeprefix("tinker://")
    model, _, kept = last.partition("/")
    of_server = work / "served/serve"
    place = model.replace(":", "=")
    made = (json.loads(path.read_text()) for path in (of_server / "training_runs").iterdir())
    facts = next(one for one in made if one["id"] == model)
    (adapter,) = (of_server / "checkpoints" / place / kept).rglob("adapter_config.json")
    return {
        "seed": facts["seed"],
        "reward": [row["env/all/reward/total"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
        "kl_sample_train_v1": [row["optim/kl_sample_train_v1"] for row in rows],
        "adapter": str(adapter.parent),
    }


def check_sums(folder: Path, steps: int) -> None:
    """Hold that the recipe asked the sums that its partner is asked, by the prompts that it wrote down."""
    for step in range(steps):
        told = (folder / f"iteration_{step:06d}/train_logtree.json").read_text()
        asked = {(int(left), int(right)) for left, right in re.findall(r"What is (\d+) \+ (\d+)\?", told)} - {(4, 5)}
        if not asked or not asked <= {*sums_of_step(step, PROMPTS)}:
            raise SystemExit(f"step {step} of the recipe asked other sums than its partner is asked: {sorted(asked)}")


def write_rows(path: Path, steps: int) -> None:
    """The recipe's sums as rows in its order."""
    sums = [one for step in range(steps) for one in sums_of_step(step, PROMPTS)]
    rows = [{"question": prompt(*one), "answer": str(sum(one)), "order": number} for number, one in enumerate(sums)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_partner(model: Path, work: Path, name: str, steps: int, seed: int) -> dict[str, Any]:
    """One run of `megarl train` from the adapters that `seed` draws."""
    write_rows(work / "sums.jsonl", steps)
    command = [sys.executable, "-m", "megarl", "train", str(ROOT / "benchmarks/served_curves.yaml")]
    command += [f"run.folder={work}", f"run.name={name}", f"run.steps={steps}", f"run.seed={seed}", f"model.path={model}"]
    command += [f"data.train.path={work / 'sums.jsonl'}"]
    shutil.rmtree(work / name, ignore_errors=True)
    with (work / f"{name}.log").open("w") as said:
        subprocess.run(
            command, env=environment(), cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, check=True, timeout=TIMEOUT_S
        )
    rows = [row for row in map(json.loads, (work / name / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in row]
    return {
        "seed": seed,
        "reward": [row["reward/mean"] for row in rows],
        "grad_norm": [row["policy/grad_norm"] for row in rows],
        "adapter": str(work / name / "model"),
    }


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the final rewards over seeds, their standard errors, and the difference, all as shares of 1."""
    final = {side: [run["held_out"] for run in runs if run["side"] == side] for side in (SERVED, TRAINED)}
    found: dict[str, Any] = {
        side: {"mean": mean(values), "standard_error": stdev(values) / len(values) ** 0.5 if len(values) > 1 else None}
        for side, values in final.items()
        if values
    }
    if len(found) == 2:
        errors = [found[side]["standard_error"] for side in (SERVED, TRAINED)]
        found["difference"] = found[SERVED]["mean"] - found[TRAINED]["mean"]
        found["standard_error"] = None if None in errors else sum(error**2 for error in errors) ** 0.5
        found["differences"] = [left - right for left, right in zip(final[SERVED], final[TRAINED], strict=False)]
    return found


def table(found: dict[str, Any]) -> list[str]:
    """Markdown rows: held-out rewards of both sides by seed, their means, and what is between them; – where one is missing."""
    final, held_out = found["final"], {(run["side"], run["number"]): run["held_out"] for run in found["runs"]}
    lines = ["| | the recipe by the API | `megarl train` | difference |", "|---|---|---|---|"]
    for number in sorted({number for _, number in held_out}):
        sides = [held_out.get((side, number)) for side in (SERVED, TRAINED)]
        lines.append(_row(f"seed {number + 1}", sides, _points(*sides)))
    sides = [final.get(side, {}).get("mean") for side in (SERVED, TRAINED)]
    error = "" if final.get("standard_error") is None else f", standard error {100 * final['standard_error']:.1f}"
    return [*lines, _row("mean", sides, _points(*sides) + error)]


def _row(name: str, sides: list[float | None], difference: str) -> str:
    return f"| {name} | {' | '.join('–' if side is None else f'{100 * side:.1f} %' for side in sides)} | {difference} |"


def _points(served: float | None, trained: float | None) -> str:
    return "–" if served is None or trained is None else f"{100 * (served - trained):+.1f} points"


def curve(found: dict[str, Any]) -> list[str]:
    """Markdown rows: the mean reward of five steps at a time over a side's seeds, and the largest difference of log-probs."""
    starts = range(0, found["setup"]["steps"], LAST_STEPS)
    lines = [
        f"| steps | {' | '.join(f'{start + 1}–{start + LAST_STEPS}' for start in starts)} |",
        "|---" * (len(starts) + 1) + "|",
    ]
    for side, name in ((SERVED, "the recipe by the API"), (TRAINED, "`megarl train`")):
        curves = [run["reward"] for run in found["runs"] if run["side"] == side]
        if not curves:
            continue
        means = (mean(reward for one in curves for reward in one[start : start + LAST_STEPS]) for start in starts)
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in means)} |")
    if apart := [run["kl_sample_train_v1"] for run in found["runs"] if run.get("kl_sample_train_v1")]:
        largest = (max(abs(value) for one in apart for value in one[start : start + LAST_STEPS]) for start in starts)
        lines.append(f"| largest `optim/kl_sample_train_v1` | {' | '.join(f'{value:.1g}' for value in largest)} |")
    return lines


def version_in(python: Path, package: str) -> str:
    """The version of a package in another environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


class Record:
    """The JSON file, which is written whenever a run has ended."""

    def __init__(self, path: Path, setup: dict[str, Any]) -> None:
        self.path, self.setup = path, setup
        known = json.loads(path.read_text()) if path.exists() else {}
        self.runs: list[dict[str, Any]] = known.get("runs", [])

    def get(self, side: str, number: int) -> dict[str, Any] | None:
        """The run of this side and number that is there."""
        return next((run for run in self.runs if (run["side"], run["number"]) == (side, number)), None)

    def add(self, run: dict[str, Any]) -> None:
        """Add a run and write all."""
        self.runs = sorted([*self.runs, run], key=lambda run: (run["number"], run["side"]))
        found = self.setup | {"runs": self.runs, "final": compared(self.runs)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found, indent=1) + "\n")


def measured(
    side: str, number: int, *, work: Path, sums: list[Sum], draws: int, run: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """A run, timed and judged."""
    started = time.monotonic()
    found = run()
    seconds = time.monotonic() - started
    reward, error = judged(work / "model", Path(found.pop("adapter")), sums, draws)
    last = mean(found["reward"][-LAST_STEPS:])
    print(f"{side} {number}: last steps {last:.3f}, held out {reward:.3f} ± {error:.4f}, {seconds:.0f} s", flush=True)
    found |= {"held_out": reward, "held_out_error": error}
    return {"side": side, "number": number, "date": datetime.now(UTC).date().isoformat(), "seconds": seconds} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cookbook", type=Path, required=True, help="python of an environment with tinker-cookbook")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/served-curves", help="folder of the model and all runs")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sums", type=int, default=1000, help="held-out sums")
    parser.add_argument("--draws", type=int, default=64, help="answers to each of them")
    arguments = parser.parse_args()
    work, steps = arguments.work.resolve(), arguments.steps
    model = work / "model"
    work.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").exists():
        make(model)
    cache_of_hub(work / "cache", model)
    sums = held_out(steps, PROMPTS, arguments.sums)
    packages = {name: version_in(arguments.cookbook, name) for name in ("tinker", "tinker-cookbook")}
    setup = {
        "command": "python benchmarks/served_curves.py --cookbook VENV/bin/python",
        "recipe": "python " + " ".join(recipe_command("URL", Path("FOLDER"), steps)),
        "partner": f"megarl train benchmarks/served_curves.yaml run.steps={steps} run.seed=SEED",
        "machine": machine(),
        "code": code_of("served_curves"),
        "versions": versions() | packages | {"peft": version("peft")},
        "setup": {"prompts": PROMPTS, "samples": SAMPLES, "rank": RANK, "lr": LR, "steps": steps, "held_out": arguments.sums}
        | {"answers": arguments.draws},
        "start": judged(model, None, sums, arguments.draws)[0],
    }
    record = Record(arguments.out, setup)
    judge = partial(measured, work=work, sums=sums, draws=arguments.draws)
    missing = [number for number in range(arguments.seeds) if record.get(SERVED, number) is None]
    if missing:
        shutil.rmtree(work / "served", ignore_errors=True)
        with serving(model, work) as url:
            for number in missing:
                recipe = partial(serve_recipe, url, arguments.cookbook, work, f"recipe-{number}", steps)
                record.add(judge(SERVED, number, run=recipe))
    for number in range(arguments.seeds):
        served = record.get(SERVED, number)
        if served is not None and record.get(TRAINED, number) is None:
            partner = partial(train_partner, model, work, f"train-{number}", steps, served["seed"])
            record.add(judge(TRAINED, number, run=partner))
    found = record.setup | {"runs": record.runs, "final": compared(record.runs)}
    print("\n".join([*table(found), "", *curve(found)]))


if __name__ == "__main__":
    main()
