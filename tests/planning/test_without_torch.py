"""Plans are made where torch, transformers, Ray, megatron-core and SGLang are not installed, as on a login node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planning.printed import planned

ROOT = Path(__file__).parents[2]
PLANNED = (
    "plans/llama-3.1-8b-grpo-8xh100", "plans/deepseek-v3-grpo-512xh200", "plans/qwen2.5-vl-7b-grpo-8xh100",
    "lora/qwen3-30b-a3b-grpo-8xh100",
)  # fmt: skip
"""Dense, with experts and latent attention, with pictures, with adapters."""
MORE = (
    "plans/qwen3-235b-a22b-grpo-256xh100", "plans/qwen3-vl-30b-a3b-grpo-32xh100", "plans/qwen3.5-27b-grpo-32xh200",
    "plans/gpt-oss-120b-sft-64xh100", "plans/kimi-k2-grpo-512xh200-int4", "plans/qwen3-32b-grpo-32xh100-fp8",
    "plans/llama-3.1-8b-ppo-32xh100", "lora/llama-3.1-70b-grpo-8xh100",
)  # fmt: skip
"""The same together, linear attention, given responses, INT4, FP8, and four models."""
BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "ray", "megatron", "sglang", "transformer_engine", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from megarl.cli import main
for config in sys.argv[1:]:
    print("PLAN", flush=True)
    assert main(["plan", config, "--json"]) == 0, config
"""


@pytest.mark.parametrize("names", [PLANNED, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["some", "more"])
def test_a_login_node_makes_the_same_plans(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"examples/{name}.yaml" for name in names]
    child = subprocess.run(
        [sys.executable, "-c", BLOCKED, *paths], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT
    )
    if child.returncode and "which this installation does not have" in child.stderr:
        pytest.skip(child.stderr)
    assert child.returncode == 0, child.stderr
    elsewhere = [json.loads(text) for text in child.stdout.split("PLAN\n")[1:]]
    for path, plan in zip(paths, elsewhere, strict=True):
        assert plan == planned(capsys, path)
