"""Doctor tells the same story as a run, names a fix for each problem, and survives libraries that crash on import."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from megarl.launch import doctor


def text_of(findings: list[doctor.Finding]) -> str:
    return text_of_table(doctor.render(findings))


def text_of_table(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.slow
def test_this_machine_is_described_by_what_a_run_would_use() -> None:
    findings = {finding.subject: finding for finding in doctor.examine()}
    assert findings["layer spec"].what.split(":")[0] in ("reference", "transformer_engine")
    assert "Adam" in findings["optimizer"].what
    assert findings["FP8"].what
    assert findings["versions"].what.startswith("megarl 0.")
    assert f"{len(os.sched_getaffinity(0))} cores" in findings["machine"].what


def test_every_problem_comes_with_a_fix() -> None:
    missing = doctor._version_findings({"megarl": "0.1.0", "torch": None, "wandb": None, "tensorboard": "2"})
    assert "nixl is not installed (optional)" in text_of(missing)
    assert "pip install 'megarl[rdma]' for rollout.weight_transport=rdma" in text_of(missing)
    assert "pip install 'megarl[wandb]' for trackers.backends=[wandb]" in text_of(missing)
    broken = doctor._trainer_findings({"error": "ImportError: libfoo.so"})
    for finding in [*missing, *broken]:
        assert finding.health == "ok" or finding.fix
    assert not doctor.is_healthy(missing)
    assert not doctor.is_healthy(broken)
    assert "libfoo.so" in text_of(broken)
    assert "fix:" in text_of(broken)


def test_a_library_that_raises_on_import_does_not_take_doctor_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text("raise RuntimeError('no CUDA driver found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor._transformer_engine_finding()
    assert finding.health == "note"
    assert "RuntimeError: no CUDA driver found" in finding.what
    assert "transformer_engine" not in sys.modules


@pytest.mark.parametrize(("core", "said"), [("0.16.1", "megatron-core 0.16.1 is not tested with"), ("0.19.2", None)])
def test_transformer_engine_beside_a_megatron_core_that_it_was_not_tested_with_is_said(
    monkeypatch: pytest.MonkeyPatch, core: str, said: str | None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "probe", lambda *words: {})
    monkeypatch.setattr(doctor, "versions", lambda: {"megatron-core": core})
    finding = doctor._transformer_engine_finding()
    assert finding.health == ("note" if said else "ok")
    assert (said or "imports") in finding.what


def test_a_cluster_without_fused_kernels_is_told_so() -> None:
    found = {
        "platform": "cuda",
        "torch_cuda": "13.0",
        "devices": ["H200"],
        "layer_spec": "reference",
        "optimizer": "torch.optim.adamw.AdamW",
    }
    findings = doctor._trainer_findings(found)
    assert [finding.health for finding in findings] == ["ok", "note", "note", "ok"]
    assert all("requirements/install-gpu.sh" in finding.fix for finding in findings[1:3])
    assert findings[3].what == "none: only transformer_engine has it"


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        ("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", "megatron-core prefers transformer_engine's"),
        ("apex.optimizers.fused_adam.FusedAdam", "transformer_engine is missing, apex is the next choice"),
        ("torch.optim.adamw.AdamW", "neither transformer_engine nor apex is there"),
    ],
)
def test_the_optimizer_is_named_with_the_reason_for_it(optimizer: str, why: str) -> None:
    finding = doctor._optimizer_finding(optimizer, is_cuda=True)
    assert finding.what.startswith(optimizer)
    assert why in finding.what


def test_the_fp8_recipes_of_a_gpu_are_listed() -> None:
    found = {"platform": "cuda", "torch_cuda": "12.8", "layer_spec": "transformer_engine", "capability": [9, 0]}
    what = doctor._fp8_finding(found).what
    assert what.startswith("delayed, tensorwise (compute capability 9.0, CUDA 12.8)")
    assert "blockwise needs Hopper or newer with CUDA 12.9" in what
    assert "mxfp8 needs Blackwell" in what
    assert doctor._fp8_finding(found | {"platform": "cpu"}).what == "none: there is no GPU"


def test_a_crash_without_words_and_a_probe_without_end_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.probe("import os; os._exit(3)") == {"error": "exit code 3"}
    monkeypatch.setattr(doctor, "PROBE_DEADLINE_S", 1)
    assert "no answer" in doctor.probe("import time; time.sleep(30)")["error"]
