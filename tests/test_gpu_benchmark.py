"""benchmarks/gpu.py says what it would run and why not, computes MFU by its formula, and runs where it has no GPU to run on."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megarl.config.megatron_options import check_megatron

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def test_the_parts_of_an_h200(gpu: ModuleType) -> None:
    parts = {part.name: part for part in gpu.parts_for((9, 0), "13.0", has_transformer_engine=True)}
    runs = [name for name, part in parts.items() if part.reason is None]
    long = [name for name in runs if not name.startswith("short")]
    assert long == ["bf16", "fp8 delayed", "fp8 tensorwise", "fp8 blockwise", "fp8 tensorwise, fp8_param"]
    assert {"short, as by default", "short, rotary embedding not fused", "short, none of these"} <= set(runs)
    assert "needs Blackwell" in parts["fp8 mxfp8"].reason
    assert (parts["fp8 blockwise"].fp8, parts["fp8 tensorwise"].fp8) == ("e4m3", "hybrid")
    assert parts["fp8 tensorwise, fp8_param"].fp8_param


def test_without_transformer_engine_the_reference_layers_are_what_runs(gpu: ModuleType) -> None:
    parts = gpu.parts_for((9, 0), "13.0", has_transformer_engine=False)
    assert [(part.name, part.layer_spec) for part in parts if part.reason is None] == [("bf16, reference layers", "reference")]
    assert {part.reason for part in parts if part.reason} == {"transformer_engine cannot be imported"}


def test_every_option_that_a_part_sets_is_one_that_a_config_may_set(gpu: ModuleType) -> None:
    for changes in gpu.SLOWER.values():
        check_megatron("policy.megatron", changes.get("megatron", {}), is_trained=True)
        assert changes.keys() <= {"megatron", "logit_chunk_tokens", "recompute"}


def test_without_a_gpu_nothing_runs_and_the_record_says_so(gpu: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main(["--out", str(tmp_path / "deep" / "gpu.json")])
    record = json.loads((tmp_path / "deep" / "gpu.json").read_text())
    assert record["device"] is None
    assert {json.dumps(part) for part in record["parts"].values()} == {'{"not_run": "there is no GPU"}'}
    assert record["log_prob_difference_from_bf16"] == {}
    assert record["versions"]["torch"]
    assert "MFU = 3 * F / (s * P)" in record["formula"]


def test_a_dry_run_lists_the_parts_and_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path / "gpu.json")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 13
    assert all("would run" in line or "not run: " in line for line in lines)
    assert not (tmp_path / "gpu.json").exists()


def test_mfu_is_six_operations_per_weight_and_token_plus_attention(gpu: ModuleType) -> None:
    hidden, ffn, layers, vocab, kv = 4096, 14336, 8, 32768, 1024
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    tokens, responses = 2048 * 8, 1024 * 8
    pairs = 8 * 2048 * 2049 // 2
    expected = 6 * weights * tokens + 6 * hidden * vocab * responses + 3 * 4 * layers * hidden * pairs
    flops = gpu.WORKS["8b"].flops()
    assert flops == pytest.approx(expected, rel=2e-3)
    part = gpu.Part("fp8 tensorwise", "transformer_engine", "hybrid")
    found = gpu.figures(part, [3.0, 1.0, 2.0], 5, "NVIDIA H200")
    assert found["step_s"] == 2.0
    assert found["mfu_of_bf16_peak"] == pytest.approx(flops / 2.0 / 989.4e12)
    assert found["mfu_of_fp8_peak"] == pytest.approx(found["mfu_of_bf16_peak"] / 2)
    assert found["tokens_per_s"] == tokens / 2.0
    assert gpu.figures(part, [1.0], 5, "unheard of")["mfu_of_bf16_peak"] is None
    assert gpu.peak_flops("NVIDIA H100 PCIe") == 756e12


def test_a_part_that_fails_or_comes_too_late_is_recorded_with_the_reason(gpu: ModuleType, tmp_path: Path) -> None:
    part = gpu.Part("bf16", "transformer_engine")
    assert gpu.run_all([part], tmp_path, lambda part: {"step_s": 1.0}, 60.0) == {"bf16": {"step_s": 1.0}}
    assert gpu.run_all([part], tmp_path, lambda part: {}, -1.0)["bf16"] == {"not_run": "-1 s were over"}
    answer = gpu.in_a_process(gpu.Part("no such part", "reference"), tmp_path)
    assert answer["not_run"] == f"failed: {answer['last_lines'][-1]}"
    assert "Traceback" in answer["last_lines"][0]


def test_log_prob_differences_are_of_absolute_values(gpu: ModuleType) -> None:
    found = gpu.differences(torch.tensor([0.0, -1.0, 3.0]), torch.tensor([0.5, -1.0, 1.0]))
    assert found["mean"] == pytest.approx(2.5 / 3)
    assert found["max"] == 2.0


TINY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gpu
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8)
gpu.WORKS["8b"] = gpu.Work(gpu.LLAMA | sizes | {"tie_word_embeddings": False}, 6, 5, 4)
gpu.WARMUP_STEPS, gpu.STEPS = 1, 3
folder = Path(sys.argv[2])
gpu.write_models(["8b"], folder)
part = gpu.Part("bf16, reference layers", "reference", logit_chunk_tokens=3, megatron={"overlap_grad_reduce": False})
print("FOUND" + json.dumps(gpu.run_part(part, folder)))
"""


@pytest.mark.slow
def test_a_part_runs_from_the_model_to_the_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TINY, str(SCRIPT.parent), str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout.split("FOUND")[1])
    assert len(found["step_s_all"]) == 3
    assert found["peak_memory_bytes"] > 0
    scores = torch.load(tmp_path / "bf16, reference layers.pt")
    assert scores.shape == (2 * 4 * 5,)
    assert bool((scores < 0).all())
