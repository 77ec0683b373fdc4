"""Recipes of the cookbook, as they are installed, against `megarl serve` on a CPU: whether each ends, and what it said.

    make cookbook
    python benchmarks/served_recipes.py --out benchmarks/results/served_recipes.json

Each recipe is a process of the cookbook's own environment, with its usual command at a small size. Rows, and the model with its
tokenizer, are in the folder in which it works (recipe_rows.py), by the names that it asks for; the internet is not used. One
server in float32 answers them all, one recipe after the other. `--recipes` names those to run; what `--out` has of the others
stays. `make docs` writes the table of docs/serve.md.
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
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipe_rows
import yaml
from measured_code import code_of
from workload import ROOT, free_port, machine, publish, versions

sys.path.insert(0, str(ROOT))

from tests.themes.e2e.processes import outside_ray

COOKBOOK = Path(os.environ.get("COOKBOOK_VENV", ROOT / ".venv-cookbook"))
"""The environment that `make cookbook` makes."""
BASE = "Qwen/Qwen3-4B-Instruct-2507"
"""What recipes ask for."""
RENDERER = "qwen3_instruct"
"""The cookbook's choice for it; recipes whose usual choice is another model's are told."""
SMALL = "a model of two layers made by the benchmark"
KL = "optim/kl_sample_train_v1"
TEACHER = "sl_loop"


@dataclass(frozen=True)
class Recipe:
    """A recipe's module below tinker_cookbook.recipes, its arguments beside model and log, and the figure that it moves.

    `moves` says where to, or "" if the size here is too small for that. `{teacher}` in an argument is the sampler that
    `sl_loop` saved last.
    """

    module: str
    arguments: str
    figure: str
    moves: str = "up"


REWARD = "env/all/reward/total"
RECIPES = {
    "sl_basic": Recipe("sl_basic", "lora_rank=16 learning_rate=5e-3 num_epochs=3 eval_every=3", "train_mean_nll", moves="down"),
    TEACHER: Recipe("sl_loop", "lora_rank=16 learning_rate=5e-3 batch_size=32 max_steps=12", "train_mean_nll", moves="down"),
    "rl_basic": Recipe(
        "rl_basic",
        "lora_rank=16 learning_rate=3e-3 max_tokens=12 max_steps=8"
        " dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder dataset_builder.batch_size=8"
        f" dataset_builder.group_size=8 dataset_builder.renderer_name={RENDERER}"
        f" dataset_builder.model_name_for_tokenizer={BASE}",
        REWARD,
    ),
    "rl_loop": Recipe(
        "rl_loop",
        "loss_fn=importance_sampling lora_rank=16 learning_rate=3e-3 max_tokens=12 max_steps=8 batch_size=8 group_size=8",
        "reward/total",
    ),
    "math_rl (arithmetic)": Recipe(
        "math_rl.train",
        "env=arithmetic loss_fn=importance_sampling lora_rank=16 learning_rate=3e-3 max_tokens=5 max_steps=8 groups_per_batch=8"
        " group_size=8 eval_every=0",
        REWARD,
    ),
    "preference.dpo": Recipe(
        "preference.dpo.train", "dataset=hhh learning_rate=1e-3 batch_size=32 max_steps=8", "dpo_loss", moves="down"
    ),
    "preference.shorter": Recipe(
        "preference.shorter.train",
        f"renderer_name={RENDERER} learning_rate=3e-3 max_tokens=24 max_steps=12 batch_size=8 group_size=8 eval_every=0",
        "env/all/ac_tokens_per_turn",
        moves="down",
    ),
    "distillation.on_policy": Recipe(
        "distillation.on_policy_distillation",
        f"teacher_model={BASE} teacher_checkpoint={{teacher}} dataset=deepmath lora_rank=16 learning_rate=3e-3 max_tokens=12"
        " groups_per_batch=8 group_size=4 max_steps=8 eval_every=0",
        "teacher_kl",
        moves="down",
    ),
    "multiplayer_rl.guess_number": Recipe(
        "multiplayer_rl.guess_number.train",
        f"renderer_name={RENDERER} learning_rate=3e-3 max_tokens=12 max_steps=4 batch_size=4 group_size=4 eval_every=0",
        REWARD,
        moves="",
    ),
    "rl_numerics_check": Recipe(
        "rl_numerics_check.train",
        "lora_rank=16 learning_rate=3e-3 max_tokens=40 max_steps=4 groups_per_batch=4 group_size=4 task.num_pages_min=1"
        " task.num_pages_max=2 task.page_chars=120 max_trajectory_tokens=2000",
        REWARD,
        moves="",
    ),
}


def why_not() -> str | None:
    """Say why recipes cannot be run here; None if they can."""
    if (COOKBOOK / "bin/python").exists():
        return None
    return f"no environment of the cookbook at {COOKBOOK}: make cookbook, or set COOKBOOK_VENV to one"


def prepare(folder: Path, model: Path | None = None) -> Path:
    """Make the recipes' working folder; returns the base model's folder, which is `model` or a small one made here."""
    base = folder / BASE
    if model is None:
        import recipe_model  # torch and transformers, which those who only read the figures need not load

        recipe_model.write_model(base)
    else:
        shutil.copytree(model, base, ignore=shutil.ignore_patterns("*.safetensors"))
    recipe_rows.write_data_sets(folder)
    return model or base


def config_of(model: Path, folder: Path) -> dict[str, Any]:
    """A server's config on one CPU core, in float32."""
    return {
        "run": {"folder": str(folder / "runs"), "name": "served"},
        "model": {"path": str(model), "dtype": "float32"},
        "policy": {"threads_per_rank": 1, "max_tokens_per_micro_batch": 4096},
        "serve": {"models": {BASE: None}, "max_rank": 32, "live_models": 4, "context_tokens": 4096, "port": free_port()},
        "data": {"max_prompt_tokens": 3072},
        "rollout": {"threads": 1},
    }


@contextmanager
def serving(config: dict[str, Any], folder: Path) -> Iterator[str]:
    """A `megarl serve` process while the block runs; gives the address where it answers."""
    file, said = folder / "serve.yaml", folder / "serve.log"
    file.write_text(yaml.safe_dump(config))
    with said.open("w") as log:
        command = [sys.executable, "-m", "megarl", "serve", str(file)]
        server = subprocess.Popen(command, cwd=ROOT, env=outside_ray(), stdout=log, stderr=subprocess.STDOUT)
    try:
        while not (found := re.search(r"serving .* at (http://\S+):", said.read_text())):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended: {said.read_text()}")
            time.sleep(0.2)
        yield found[1]
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(timeout=300)
        finally:
            server.kill()


def command_of(name: str, log: Path, teacher: str = "") -> list[str]:
    """The arguments of a recipe's process, behind the Python of its environment."""
    recipe = RECIPES[name]
    arguments = recipe.arguments.format(teacher=teacher).split()
    return ["-m", f"tinker_cookbook.recipes.{recipe.module}", f"model_name={BASE}", f"log_path={log}", *arguments]


def environment(url: str, folder: Path) -> dict[str, str]:
    """Of a recipe's process: where the server is, nothing of the hub, and no module from the folders of rows."""
    return os.environ | {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-local",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": "",
    }


def teacher_of(url: str, folder: Path) -> str:
    """Name the sampler that `sl_loop` saved last; it is run if it was not."""
    saved = folder / "logs" / TEACHER / "checkpoints.jsonl"
    if not saved.exists():
        run(TEACHER, url, folder)
    return str(json.loads(saved.read_text().splitlines()[-1])["sampler_path"])


def run(name: str, url: str, folder: Path, timeout_s: float = 900) -> dict[str, Any]:
    """Run a recipe in `folder`; returns its figures.

    Raises:
        RuntimeError: it did not end well; the message is the end of what it said.
    """
    log = folder / "logs" / name.split()[0]
    teacher = teacher_of(url, folder) if "{teacher}" in RECIPES[name].arguments else ""
    began = time.monotonic()
    said = subprocess.run(
        [str(COOKBOOK / "bin/python"), *command_of(name, log, teacher)],
        cwd=folder, env=environment(url, folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    if said.returncode:
        raise RuntimeError(f"{name} ended with {said.returncode}:\n{said.stdout[-6000:]}")
    return figures(name, log) | {"seconds": time.monotonic() - began}


def figures(name: str, log: Path) -> dict[str, Any]:
    """What a recipe's metrics.jsonl says: its steps, its figure in each, and the sampler's difference from the trainer."""
    recipe = RECIPES[name]
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    values = [row[recipe.figure] for row in rows if recipe.figure in row]
    differences = [abs(row[KL]) for row in rows if KL in row]
    shown = recipe.arguments.format(teacher="tinker://…")
    found = {"arguments": shown, "steps": len(values), "figure": recipe.figure, "values": values}
    return found | ({"kl_sample_train": max(differences)} if differences else {})


def table(found: dict[str, Any]) -> list[str]:
    """The lines of docs/serve.md: what was run where, and a row for each recipe."""
    of, by = found["versions"], found["machine"]
    lines = [
        f"tinker {of['tinker']} and tinker-cookbook {of['tinker-cookbook']}, {found['model']}, in float32 on"
        f" {by['cores']} cores of {by['processor']}, {found['date']}:",
        "",
        "| `python -m tinker_cookbook.recipes.…`, with `model_name=…` | what was seen | sampler against trainer |",
        "|---|---|---|",
    ]
    for name, recipe in RECIPES.items():
        if (row := found["recipes"].get(name)) is None:
            continue
        values = row["values"]
        seen = f"{row['steps']} steps, `{row['figure']}` {values[0]:.3g} → {values[-1]:.3g}"
        seen += "" if recipe.moves else ", too few to learn"
        seen += f" ({row['model']})" if "model" in row else ""
        difference = f"{row['kl_sample_train']:.1e}" if "kl_sample_train" in row else ""
        lines.append(f"| `{recipe.module} {row['arguments']}` | {seen} | {difference} |")
    return lines


def cookbook_versions() -> dict[str, str]:
    """Of the client and the cookbook in their environment."""
    code = "from importlib.metadata import version; print(version('tinker'), version('tinker-cookbook'))"
    said = subprocess.run([str(COOKBOOK / "bin/python"), "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(("tinker", "tinker-cookbook"), said.stdout.split(), strict=True))


def measure(names: Sequence[str], model: Path | None, found: dict[str, Any], out: Path | None) -> list[str]:
    """Run the recipes against one server; each one's figures are written as it ends. Returns what those said that failed."""
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = prepare(folder, model)
        with serving(config_of(base, folder), folder) as url:
            for name in names:
                try:
                    found["recipes"][name] = run(name, url, folder)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    failed.append(f"{name}: {error}")
                publish(found, out)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=[*RECIPES])
    parser.add_argument("--model", type=Path, help="a model's folder; without, a small one is made")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(reason)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out is not None and options.out.exists() else {}
    found |= {
        "command": "python benchmarks/served_recipes.py",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "code": code_of("served_recipes"),
        "versions": versions() | cookbook_versions(),
        "model": SMALL if options.model is None else options.model.name,
        "recipes": found.get("recipes", {}),
    }
    if failed := measure(options.recipes, options.model, found, options.out):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
