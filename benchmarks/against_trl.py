"""Samples per second of a GRPO step: megarl against TRL's GRPOTrainer with Hugging Face generation, on the same prompts.

Run from the repository's root in megarl's environment; TRL gets an environment of its own, `.venv-trl`. Writes one JSON file;
the two sides run one after the other.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import reasoning_gym

ROOT = Path(__file__).resolve().parent.parent
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""chain_sum rows; with SmolLM2's chat template a prompt has 46 to 48 tokens."""
TRL_PACKAGES = ["trl==1.16.0", "transformers==5.19.0", "datasets==5.2.0", "accelerate==1.15.0"]
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""glibc keeps freed activations instead of returning them page by page; both sides have it."""


def write_prompts(path: Path, count: int) -> None:
    """Rows `{"prompt": chat messages, "answer": text}`, which both sides render with the model's own chat template."""
    task = reasoning_gym.create_dataset("chain_sum", seed=0, size=count, **TASK)
    rows = [{"prompt": [{"role": "user", "content": item["question"]}], "answer": item["answer"]} for item in task]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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


def run_trl(args: argparse.Namespace, prompts: Path, work: Path) -> dict[str, Any]:
    """Figures of TRL: `steps` as measured in its own process, `settings` and `versions`."""
    out = work / "trl.json"
    command = [trl_environment(args.trl_venv), ROOT / "benchmarks/trl_reference.py", prompts]
    command += ["--model", args.model, "--out", out, "--steps", args.warmup_steps + args.steps]
    command += ["--micro-batch", args.micro_batch]
    subprocess.run([str(part) for part in command], check=True, env=benchmark_environment())
    return json.loads(out.read_text())


def run_megarl(args: argparse.Namespace, prompts: Path, work: Path) -> dict[str, Any]:
    """Figures of megarl in the same form, from the metrics of a run of `args.config` on the same prompts."""
    command = [str(Path(sys.executable).with_name("megarl")), "train", str(args.config)]
    command += ["run.name=megarl", f"run.folder={work}", f"model.path={args.model}"]
    command += [f"run.steps={args.warmup_steps + args.steps}"]
    command += ["data.train.source=jsonl", f"data.train.path={prompts}", "data.prompt_key=prompt"]
    subprocess.run(command, check=True, env=benchmark_environment())
    folder = work / "megarl"
    steps = [
        {
            "step_s": line["time/step_s"],
            "generate_s": line["time/generate_s"],
            "train_s": line["time/train_s"],
            "samples": line["rollout/samples"],
        }
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if "time/step_s" in line
    ]
    return {"steps": steps, "phases": json.loads((folder / "summary.json").read_text())["phases"]}


def benchmark_environment() -> dict[str, str]:
    """Environment of both sides: quiet, offline, malloc thresholds raised; threads are each side's own business."""
    return os.environ | MALLOC | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def with_rates(figures: dict[str, Any], warmup_steps: int) -> dict[str, Any]:
    """`figures` with medians in seconds over the steps after the warm-up, and samples per second of the median step."""
    steps = figures["steps"][warmup_steps:]
    medians = {name: statistics.median(step[name] for step in steps) for name in ("step_s", "generate_s", "train_s")}
    return {"samples_per_s": steps[0]["samples"] / medians["step_s"], "median": medians, **figures}


def cpu_name() -> str:
    """Model name of the processor, or its architecture where the system does not say."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("against_trl.json"), help="JSON file to write")
    parser.add_argument("--only", choices=["trl", "megarl"], help="run one side")
    parser.add_argument("--steps", type=int, default=4, help="steps that count")
    parser.add_argument("--warmup-steps", type=int, default=1, help="steps before them that do not")
    parser.add_argument("--micro-batch", type=int, default=16, help="TRL's sequences per forward and backward pass")
    parser.add_argument("--model", type=Path, default=ROOT / "models/SmolLM2-135M-Instruct")
    parser.add_argument("--config", type=Path, default=ROOT / "examples/benchmark/step.yaml", help="megarl's configuration")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    args = parser.parse_args()

    result: dict[str, Any] = {
        "cpu": {"name": cpu_name(), "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]},
        "work": "8 prompts x 8 samples x 16 new tokens, float32, full fine-tuning, one update per step",
    }
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, 8 * (args.warmup_steps + args.steps))
        for side, run in (("trl", run_trl), ("megarl", run_megarl)):
            if args.only in (None, side):
                result[side] = with_rates(run(args, prompts, Path(folder)), args.warmup_steps)
    if args.only is None:
        result["megarl_over_trl"] = result["megarl"]["samples_per_s"] / result["trl"]["samples_per_s"]
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    for side in ("trl", "megarl"):
        if side in result:
            median = ", ".join(f"{name} {value:.1f}" for name, value in result[side]["median"].items())
            print(f"{side}: {result[side]['samples_per_s']:.2f} samples/s ({median})")


if __name__ == "__main__":
    main()
