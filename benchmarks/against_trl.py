"""Samples per second of a GRPO step: megarl against TRL's GRPOTrainer with Hugging Face generation, on the same prompts.

    python benchmarks/against_trl.py --out benchmarks/results/against_trl.json

Run in megarl's environment; TRL gets one of its own, `.venv-trl`, made on first use. The two sides run one after the other,
each with glibc told to keep freed memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measured_code import code_of
from workload import MODEL, NEW_TOKENS, PROMPTS, ROOT, SAMPLES, machine, medians, run_megarl, write_prompts

TRL_PACKAGES = ["trl==1.16.0", "transformers==5.19.0", "datasets==5.2.0", "accelerate==1.15.0"]
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""For TRL's process; megarl sets such thresholds for its workers itself."""


def trl_environment(folder: Path) -> Path:
    """The Python of an environment with TRL and the same torch release as here; made on first use."""
    python, stamp = folder / "bin/python", folder / ".installed"
    torch = f"torch=={version('torch').partition('+')[0]}"
    wanted = "\n".join([torch, *TRL_PACKAGES])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, torch, *TRL_PACKAGES], check=True)
    stamp.write_text(wanted)
    return python


def run_trl(arguments: argparse.Namespace, steps: int, prompts: Path, work: Path) -> dict[str, Any]:
    """Figures of TRL: `steps` as measured in its own process, `settings` and `versions`."""
    out = work / "trl.json"
    command = [trl_environment(arguments.trl_venv), ROOT / "benchmarks/trl_reference.py", prompts]
    command += ["--model", MODEL, "--out", out, "--steps", steps, "--micro-batch", arguments.micro_batch]
    command += ["--prompts", PROMPTS, "--samples", SAMPLES, "--new-tokens", NEW_TOKENS]
    environment = os.environ | KEEP_MEMORY | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    subprocess.run([str(part) for part in command], check=True, env=environment)
    return json.loads(out.read_text())


def with_rates(figures: dict[str, Any], warmup_steps: int, names: tuple[str, ...]) -> dict[str, Any]:
    """`figures` with the medians of `names` over the steps after the warm-up, and samples per second of the median step."""
    median = medians(figures["steps"][warmup_steps:], names)
    return {"samples_per_s": PROMPTS * SAMPLES / median[names[0]], "median": median, **figures}


def main() -> None:
    """Run both sides, write the JSON file and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("against_trl.json"), help="JSON file to write")
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--warmup-steps", type=int, default=1, help="steps before them that do not")
    parser.add_argument("--micro-batch", type=int, default=16, help="TRL's sequences per forward and backward pass")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    arguments = parser.parse_args()
    steps = arguments.warmup_steps + arguments.steps
    result: dict[str, Any] = {
        "work": f"{PROMPTS} prompts x {SAMPLES} samples x {NEW_TOKENS} new tokens, float32, one update per step",
        "machine": machine(),
        "code": code_of("against_trl"),
    }
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, PROMPTS * steps)
        trl = run_trl(arguments, steps, prompts, Path(folder))
        result["trl"] = with_rates(trl, arguments.warmup_steps, ("step_s", "generate_s", "train_s"))
        megarl = run_megarl(steps, prompts, Path(folder))
        names = ("time/step_s", "time/sync_s", "time/generate_s", "time/update_s")
        result["megarl"] = with_rates(megarl, arguments.warmup_steps, names)
    result["megarl_over_trl"] = result["megarl"]["samples_per_s"] / result["trl"]["samples_per_s"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for side in ("trl", "megarl"):
        times = ", ".join(f"{name} {value:.1f}" for name, value in result[side]["median"].items())
        print(f"{side}: {result[side]['samples_per_s']:.2f} samples/s ({times})")
    print(f"megarl over TRL: {result['megarl_over_trl']:.2f}")


if __name__ == "__main__":
    main()
