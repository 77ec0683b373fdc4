"""Tiny runs over two nodes: GRPO on an embedded engine, and supervised fine-tuning, each with a rank on either node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CPU_NODES = ["--gpus-per-node", "0", "--places-per-node", "1", "--warn-s", "60", "--time", "00:10:00"]
"""Options of `megarl submit` for nodes without GPUs that hold a rank each."""
_TASK = {"source": "reasoning_gym", "name": "chain_sum", "limit": 32}
_SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def grpo(folder: Path, model: Path, *, steps: int, engine: str = "embedded") -> Path:
    """The config file of a GRPO run in `folder`: two training ranks, or one that sends its weights to an SGLang elsewhere."""
    tree: dict[str, Any] = {
        "run": {"name": "grpo", "folder": str(folder / "runs"), "steps": steps, "log_samples": 0},
        "policy": {"layout": {"dp": 2}, "max_tokens_per_micro_batch": 512, "threads_per_rank": 1, "optimizer": {"lr": 1e-3}},
        "data": {"train": _TASK | {"args": _SMALL}, "max_prompt_tokens": 96},
        "rollout": {"engine": "embedded", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
        "rewards": [{"name": f"{Path(__file__).with_name('patient.py')}:share_of_digits"}],
    }
    if engine == "sglang":
        tree["policy"]["layout"] = {}
        tree["resources"] = {"placement": "separate"}
        tree["rollout"] |= {"engine": "sglang", "weight_transport": "process_group", "threads": 1}
        tree["rollout"]["engine_args"] = {"max_total_tokens": 2048, "max_running_requests": 8}
    return _written(folder / "grpo.yaml", tree, model)


def sft(folder: Path, model: Path, *, steps: int) -> Path:
    """The config file of a run of supervised fine-tuning in `folder`."""
    rows = [{"prompt": f"{a} + {b} = ", "response": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "run": {"name": "sft", "folder": str(folder / "runs"), "steps": steps},
        "policy": {"layout": {"dp": 2}, "max_tokens_per_micro_batch": 512, "threads_per_rank": 1, "optimizer": {"lr": 1e-3}},
        "objective": {"name": "sft"},
        "data": {"train": {"source": "jsonl", "path": str(folder / "sums.jsonl")}, "rows_per_step": 8, "max_tokens": 32},
    }
    return _written(folder / "sft.yaml", tree, model)


def _written(path: Path, tree: dict[str, Any], model: Path) -> Path:
    path.write_text(yaml.safe_dump({"model": {"path": str(model), "dtype": "float32"}} | tree))
    return path
