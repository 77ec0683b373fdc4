"""The work that benchmarks/step.py and benchmarks/against_trl.py time, and what both record about it.

One GRPO step: 8 prompts x 8 samples x exactly 16 new tokens, float32, full fine-tuning, one update.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import reasoning_gym

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/SmolLM2-135M-Instruct"
PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 16
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""chain_sum rows; with SmolLM2's chat template a prompt has 46 to 48 tokens."""
VERSIONS = ("torch", "megatron-core", "sglang", "ray", "transformers")


def write_prompts(path: Path, count: int) -> None:
    """Rows `{"prompt": chat messages, "answer": text}`, to be rendered with the model's own chat template."""
    task = reasoning_gym.create_dataset("chain_sum", seed=0, size=count, **TASK)
    rows = [{"prompt": [{"role": "user", "content": item["question"]}], "answer": item["answer"]} for item in task]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def response_length(samples: Sequence[Any]) -> list[float]:
    """Reward: characters of the response, which differ within nearly every group, so that no group's advantages vanish."""
    return [float(len(sample.response_text)) for sample in samples]


def run_megarl(steps: int, prompts: Path, work: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run benchmarks/step.yaml for `steps` steps in a process of its own, its run folder below `work`.

    Returns `steps` (each one's metrics), `phases` (seconds and share over all steps), `gates` and `versions`.
    """
    command = [str(Path(sys.executable).with_name("megarl")), "train", str(ROOT / "benchmarks/step.yaml")]
    command += [f"run.folder={work}", f"run.steps={steps}", f"data.train.path={prompts}", *overrides]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    lines = map(json.loads, (work / "step" / "metrics.jsonl").read_text().splitlines())
    figures = [line for line in lines if "time/step_s" in line]
    short = [line for line in figures if line["response/tokens_mean"] != NEW_TOKENS]
    if short:
        sys.exit(f"not every response has {NEW_TOKENS} tokens, so the work is another: {short[0]}")
    summary = json.loads((work / "step" / "summary.json").read_text())
    return {"steps": figures, "phases": summary["phases"], "gates": summary["gates"], "versions": versions()}


def medians(steps: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Median over `steps` of each name, a step that lacks it counting as 0."""
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def versions() -> dict[str, str]:
    """Versions of what megarl runs on."""
    return {name: version(name) for name in VERSIONS} | {"python": platform.python_version()}


def publish(report: Mapping[str, Any], out: Path | None) -> None:
    """Print a benchmark's report, and write it to `out` if there is one."""
    text = json.dumps(report, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    print(text)


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine() -> dict[str, Any]:
    """The processor, the cores that may be used, and the date and the load when this was called."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "date": datetime.now(UTC).date().isoformat(),
        "load": os.getloadavg()[0],
    }
