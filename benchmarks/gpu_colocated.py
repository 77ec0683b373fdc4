"""GRPO on one GPU that trainer and SGLang take turns on: seconds and memory by turn, and a weight update beside a plain copy.

    python benchmarks/gpu_colocated.py --out benchmarks/results/gpu_colocated.json [--steps 5] [key=value …]

The model has the shape of Llama-3.2-1B and random weights; every response has exactly `NEW_TOKENS` tokens. `key=value`
overrides fields of the run's config. NVML is asked ten times a second what the GPU holds. Beside what was measured stands
`megarl plan`'s prediction of each phase, and of the memory of each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpu import WORKS, write_models  # noqa: E402

from benchmarks.measured_code import code_of  # noqa: E402
from megarl.observe.summary import machine, versions  # noqa: E402
from megarl.planning.gpus import gpu_called  # noqa: E402

WORK = "1b, short"
"""Whose model it is, of `gpu.WORKS`."""
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 64, 512
WORDS = 5000
POLL_S = 0.1
COPIES = 5
REWARD = '''
def even(sample):
    """The share of even ids, which takes no text to judge."""
    return sum(token % 2 == 0 for token in sample.response_ids) / len(sample.response_ids)
'''


def write_model(folder: Path) -> int:
    """Random weights, and a tokenizer with a word for each of the first ids; returns the bytes of the weights in BF16."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_models([WORK], folder.parent, device="cpu")  # not on the GPU, of which this process would keep some
    (folder.parent / WORK).rename(folder)
    words = {"<eos>": 0, "<unk>": 1} | {f"w{number}": number + 2 for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def config_in(work: Path, steps: int) -> dict[str, Any]:
    """The run's config; the files that it names are in `work`."""
    return {
        "run": {"name": "colocated", "folder": str(work / "runs"), "steps": steps, "save_every": 0},
        "model": {"path": str(work / "model"), "dtype": "bfloat16", "recompute": "selective"},
        "policy": {"max_tokens_per_micro_batch": 16384, "optimizer": {"lr": 1e-6}},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
        "data": {
            "train": {"source": "jsonl", "path": str(work / "rows.jsonl")},
            "prompt_key": "prompt",
            "chat_template": "never",
            "max_prompt_tokens": PROMPT_TOKENS,
        },
        "rollout": {
            "engine": "sglang",
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
        },
        "rewards": [{"name": f"{work / 'reward.py'}:even"}],
    }


class MemoryCurve(threading.Thread):
    """What the processes on the first GPU hold, in bytes, over time: the trainer's rank, the engine, and all together."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.total = int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total)
        self.points: list[tuple[float, dict[str, int]]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            held = {"all": int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used), "trainer": 0, "engine": 0}
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                held["engine" if "sglang" in called(process.pid) else "trainer"] += int(process.usedGpuMemory or 0)
            self.points.append((time.time(), held))

    def stop(self) -> None:
        """No further points."""
        self._ended.set()
        self.join()

    def within(self, begin: float, end: float) -> dict[str, float]:
        """Most and least GiB at the points of a span of time, by who holds them; nothing for a span between two points."""
        points = [held for at, held in self.points if begin <= at <= end]
        return {
            f"{who}_{what}_gib": chosen(held[who] for held in points) / 2**30
            for who in ("all", "trainer", "engine")
            for what, chosen in (("least", min), ("most", max))
            if points
        }


def called(pid: int) -> str:
    """The command line of a process, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def by_span(trace: Path, curve: MemoryCurve) -> dict[str, dict[str, float]]:
    """Of each kind of span, the driver's and the rank's: medians of its seconds and memory, after the first two steps."""
    found: dict[str, list[dict[str, float]]] = {}
    for line in trace.read_text().splitlines()[2:]:
        for who, spans in json.loads(line)["spans"].items():
            for name, begin, end in spans:
                found.setdefault(f"{who}: {name}", []).append({"seconds": end - begin} | curve.within(begin, end))
    return {
        name: {"count": len(spans)}
        | {
            key: statistics.median(span[key] for span in spans if key in span)
            for key in {key for span in spans for key in span}
        }
        for name, spans in found.items()
    }


def plain_copy_s(nbytes: int) -> float:
    """Median seconds of a copy of so many bytes within the GPU, in one piece."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    target, seconds = torch.empty_like(source), []
    for _ in range(COPIES + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def planned(config: Path, run: Path, overrides: list[str]) -> dict[str, Any]:
    """What `megarl plan` says of the run's steps: seconds by phase beside those measured, and bytes by turn."""
    import torch

    gpu = gpu_called(torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    words = [sys.executable, "-m", "megarl", "plan", str(config), "--gpu", gpu.name if gpu is not None else "h100"]
    said = subprocess.run([*words, "--against", str(run), "--json", *overrides], capture_output=True, text=True, check=False)
    if said.returncode:
        return {"error": said.stderr.strip()}
    plan = json.loads(said.stdout)
    turns = {turn: sum(parts.values()) for turn, parts in plan["memory"]["turns"].items()}
    return {"gpu": plan["gpu"], "against": plan["against"], "bytes_by_turn": turns}


def main(arguments: list[str] | None = None) -> None:
    """Run, and write the JSON file also where the run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_colocated.json"), help="JSON file to write")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=300.0, help="the run is ended after so many seconds")
    parser.add_argument("--logs", type=Path, help="folder for the run's files")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        weight_bytes = write_model(work / "model")
        config = config_in(work, given.steps)
        if given.logs is not None:
            config["run"]["folder"] = str(given.logs.resolve())
        (work / "reward.py").write_text(REWARD)
        rows = (" ".join(f"w{(7 + 31 * row + 17 * word) % WORDS}" for word in range(PROMPT_TOKENS - 1)) for row in range(1000))
        (work / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        (work / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        curve = MemoryCurve()
        curve.start()
        began = time.time()
        command = [sys.executable, "-m", "megarl", "train", str(work / "config.yaml"), *given.overrides]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        try:
            code: int | None = subprocess.run(command, timeout=given.limit_s, check=False, cwd=work, env=environment).returncode
        except subprocess.TimeoutExpired:
            code = None
        curve.stop()
        run = Path(config["run"]["folder"]) / config["run"]["name"]
        trace, metrics = run / "trace.jsonl", run / "metrics.jsonl"
        record: dict[str, Any] = {
            "machine": machine(),
            "versions": versions(),
            "code": code_of("gpu_colocated"),
            "work": {
                "model": WORKS[WORK].hf_config,
                "config": config,
                "overrides": given.overrides,
                "weight_bytes": weight_bytes,
            },
            "exit_code": code,
            "seconds": time.time() - began,
            "gpu_bytes": curve.total,
            "spans": by_span(trace, curve) if trace.exists() else {},
            "metrics": [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else [],
            "memory_curve": [[round(at - began, 2), *held.values()] for at, held in curve.points],
        }
        if code == 0:
            record["plan"] = planned(work / "config.yaml", run, given.overrides)
    if code == 0:
        record["plain_copy_s"] = plain_copy_s(weight_bytes)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2) + "\n")
    for span, figures in record["spans"].items():
        print(span, {key: round(value, 3) for key, value in sorted(figures.items())})
    for name, figures in record.get("plan", {}).items():
        print(name, figures)
    print({key: record.get(key) for key in ("exit_code", "seconds", "plain_copy_s")}, f"{weight_bytes / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
