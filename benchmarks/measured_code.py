"""Which code each benchmark measures: its figures carry a digest of it, by which `make docs` names figures that are older."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

STEP = (
    "megarl/algorithms", "megarl/core", "megarl/data", "megarl/experience", "megarl/megatron", "megarl/models",
    "megarl/platform", "megarl/rollout", "megarl/weights", "megarl/workers",
)  # fmt: skip
"""The rooms of a whole step."""

MEASURES: dict[str, tuple[str, ...]] = {
    "against_trl": STEP,
    "algorithms": ("megarl/algorithms",),
    "async_rollouts": ("megarl/core", "megarl/rollout", "megarl/workers", "megarl/options/lending"),
    "bad_input": ("megarl/cli", "megarl/config", "megarl/convert", "megarl/data", "megarl/rewards"),
    "budget": ("megarl/megatron", "megarl/models", "megarl/options/lora"),
    "checkpoint_cost": ("megarl/checkpoint", "megarl/runs"),
    "checkpoint_writing": ("megarl/checkpoint",),
    "convert": ("megarl/checkpoint", "megarl/convert", "megarl/models"),
    "corruption": ("megarl/checkpoint", "megarl/runs"),
    "distillation": ("megarl/algorithms", "megarl/experience", "megarl/options/distillation"),
    "elastic_engines": ("megarl/options/elastic_engines", "megarl/rollout", "megarl/workers"),
    "engine_precisions": ("megarl/options/few_bits", "megarl/options/fp8_cache", "megarl/rollout/engines/embedded.py"),
    "failures_at_scale": ("megarl/options/elastic", "megarl/planning", "megarl/supervise"),
    "faults": ("megarl/core", "megarl/rollout", "megarl/runs", "megarl/supervise", "megarl/workers"),
    "fuzz": (
        "megarl/checkpoint",
        "megarl/config",
        "megarl/data",
        "megarl/models",
        "megarl/observe",
        "megarl/rewards",
        "megarl/rollout/episodes/tool_calls.py",
        "megarl/runs",
    ),
    "gpu": ("megarl/megatron", "megarl/models", "megarl/platform"),
    "gpu_colocated": ("megarl/megatron", "megarl/platform", "megarl/rollout", "megarl/weights", "megarl/workers"),
    "gpu_paths": ("megarl/megatron", "megarl/options", "megarl/platform", "megarl/weights"),
    "group_calls": ("megarl/workers",),
    "head_memory": ("megarl/megatron/heads.py",),
    "learning": ("megarl/algorithms", "megarl/experience"),
    "learning_to_see": ("megarl/megatron", "megarl/models", "megarl/options/pictures"),
    "learning_to_hear": ("megarl/megatron", "megarl/models", "megarl/options/pictures"),
    "log_probs": ("megarl/megatron/heads.py",),
    "memory_copies": ("megarl/checkpoint/dist_writer.py", "megarl/megatron/shards.py", "megarl/options/elastic/shared_file.py"),
    "partial_responses": ("megarl/core", "megarl/rollout"),
    "planning_memory": ("megarl/megatron", "megarl/models", "megarl/planning"),
    "redaction": ("megarl/experience/samples_file.py", "megarl/observe/progress.py", "megarl/system/redaction.py"),
    "replaced_ranks": ("megarl/options/elastic", "megarl/workers"),
    "reshard": ("megarl/weights",),
    "reshard_plan": ("megarl/weights",),
    "roofline": ("megarl/megatron", "megarl/models"),
    "scaling": ("megarl/core", "megarl/data", "megarl/experience", "megarl/workers"),
    "scheduling": ("megarl/core", "megarl/rollout"),
    "serve_faults": ("megarl/options/serve", "megarl/rollout", "megarl/supervise", "megarl/workers"),
    "serving": ("megarl/options/serve", "megarl/data", "megarl/megatron"),
    "served_recipes": ("megarl/options/serve", "megarl/options/lora"),
    "served_curves": ("megarl/algorithms", "megarl/experience", "megarl/options/lora", "megarl/options/serve"),
    "served_supervised": ("megarl/algorithms", "megarl/options/lora", "megarl/options/serve", "megarl/trainers/supervised"),
    "soak": ("megarl/core", "megarl/observe", "megarl/rollout", "megarl/runs", "megarl/workers"),
    "speculative": ("megarl/megatron", "megarl/options/prediction", "megarl/rollout"),
    "state_spaces": ("megarl/options/state_spaces",),
    "step": STEP,
    "tokenising": ("megarl/data",),
    "update_checks": ("megarl/weights", "megarl/workers"),
    "update_network": ("megarl/weights", "megarl/options/transports"),
}
"""By benchmark, folders and files of the repository, beside the benchmark's own file."""


def code_of(benchmark: str) -> dict[str, str]:
    """A digest of each place that the benchmark measures, and of its own file."""
    return {place: digest(place) for place in (f"benchmarks/{benchmark}.py", *MEASURES[benchmark])}


def digest(place: str) -> str:
    """Of the Python code of a file, or of all files in a folder: lines with code on them, so that comments do not count."""
    path = ROOT / place
    files = [path] if path.is_file() else path.rglob("*.py")
    return digest_of({file.relative_to(ROOT).as_posix(): file.read_text() for file in files})


def digest_of(files: dict[str, str]) -> str:
    """Of the text of these files, by path."""
    lines = (f"{name}: {line}" for name, text in sorted(files.items()) for line in map(str.strip, text.splitlines()))
    code = [line for line in lines if line.partition(": ")[2] and not line.partition(": ")[2].startswith("#")]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]
