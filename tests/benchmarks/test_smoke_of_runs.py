"""The benchmarks that train run: each once, on the tiny model or a smaller one, under the Ray that all tests share."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.planning.turns import ALL_AT_ONCE
from tests.benchmarks.conftest import BENCHMARKS
from tests.warm_workers import WarmWorkers

ROOT = BENCHMARKS.parent
TINY, SMOLLM2 = ROOT / "models/tiny-arithmetic", ROOT / "models/SmolLM2-135M-Instruct"
Measured = Callable[..., Any]
SETUP = {"machine", "versions"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TINY.is_dir(), reason="needs models/tiny-arithmetic (make tiny-model)"),
]
SMALLER = (
    "model.path=models/tiny-arithmetic", "data.chat_template=never", "rollout.engine=embedded", "rollout.engines=1",
    "policy.layout.dp=1",
)  # fmt: skip
"""What makes the step of step.yaml one that needs neither SGLang nor SmolLM2, whose prompts are `sums`."""


def sums(path: Path, count: int) -> None:
    """Prompts for the tiny model, which has no chat template."""
    rows = ({"prompt": f"{row % 10}+3=", "answer": str(row % 10 + 3)} for row in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Here:
    """Stands for a pool of processes: the work is done in this one."""

    def __init__(self, processes: int, mp_context: Any = None) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    map = staticmethod(map)


@pytest.fixture
def warm(warm_workers: WarmWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that a benchmark starts as commands have Rays of their own, whose workers are forked."""
    for name, value in warm_workers.environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.exhaustive
def test_async_rollouts(measured: Measured, local_ray: None) -> None:
    numbers = ("step_s", "trainer_busy", "training", "waiting", "staleness", "reward_last", "accuracy", "samples_per_s")
    found = measured(
        "async_rollouts", "--seeds", "1", "--steps", "3", "--modes", "one_step", numbers=tuple(f"runs:0:{n}" for n in numbers)
    )
    assert {*SETUP, "overrides", "load"} <= found.keys()


@pytest.mark.exhaustive
def test_lent_engines(measured: Measured, local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured("async_rollouts", "--lending", "--seeds", "1", "--steps", "3")
    assert [run["mode"] for run in found["runs"]] == ["alone", "lent"]
    assert "share of waits lent" in capsys.readouterr().out


def test_checkpoint_cost(measured: Measured, local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    figures = ("checkpoint_bytes", "clean_step_s", "blocked_s", "added_s", "added_to_a_step", "whole_after_s")
    found = measured("checkpoint_cost", "--cycles", "1", *SMALLER, write_prompts=sums, numbers=figures)
    assert {*SETUP, "date", "command", "overrides"} <= found.keys()
    assert len(found["cycles_s"][0]) == 3


def test_learning(measured: Measured, local_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("learning")
    rows = {"estimator": {"gigpo": module.ESTIMATORS["gigpo"]}, "loss": {"clip": {}}}
    found = measured("learning", "--steps", "1", "--seeds", "1", ROWS=rows, ROOT=tmp_path, ProcessPoolExecutor=Here)
    assert {*SETUP, "steps", "threshold"} <= found.keys()
    assert [(run["kind"], run["name"]) for run in found["runs"]] == [(kind, name) for kind in rows for name in rows[kind]]
    assert all(math.isfinite(reward) for run in found["runs"] for reward in run["reward"])
    assert "| `gigpo` |" in capsys.readouterr().out
    assert (tmp_path / "docs/images/learning.png").stat().st_size > 0


def test_distillation(measured: Measured, local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("distillation")
    forms = dict([*module.FORMS.items()][-1:])
    found = measured(
        "distillation", "--steps", "1", "--seeds", "1", FORMS=forms, TEACHER=str(TINY), ProcessPoolExecutor=Here,
        numbers=("accuracy:student", "accuracy:teacher"),
    )  # fmt: skip
    assert {*SETUP, "steps", "margin"} <= found.keys()
    assert [run["form"] for run in found["runs"]] == [*forms]
    for run in found["runs"]:
        assert all(math.isfinite(run[name][0]) for name in ("reward/mean", "distillation/reverse_kl", "policy/entropy"))
    assert "nats/token from the teacher" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_speculative(measured: Measured, local_ray: None) -> None:
    found = measured("speculative", "--steps", "1")
    assert found.keys() >= SETUP
    assert [(run["model"], run["layer_is_trained"]) for run in found["runs"]] == [
        (model, trained) for model in ("glm4_moe", "llama") for trained in (True, False)
    ]
    assert all(1 <= run["rollout/acceptance_length"][0] <= 3 for run in found["runs"])


@pytest.mark.exhaustive
def test_redaction(measured: Measured, local_ray: None) -> None:
    numbers = ("run:ns_per_character", "run:share_of_cpu", "run:share_of_a_step", "run:share_by_default")
    found = measured("redaction", "--steps", "1", numbers=numbers)
    assert {"machine", "code", "versions", "run"} == found.keys()
    assert found["run"]["calls"]["samples"] >= found["run"]["log_samples"]
    assert 0 < found["run"]["share_by_default"] < found["run"]["share_of_a_step"]


@pytest.mark.exhaustive
def test_step(measured: Measured, warm: None) -> None:
    small = ["--steps", "1", "--warmup-steps", "1", "--rounds", "0"]
    figures = ("samples_per_s", "driver_overhead", "median:time/step_s", "median:time/update_s", "median:time/generate_s")
    found = measured("step", *small, *SMALLER, write_prompts=sums, numbers=figures)
    assert {*SETUP, "overrides", "phases", "gates"} <= found.keys()
    assert len(found["steps"]) == 2


@pytest.mark.exhaustive
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs models/SmolLM2-135M-Instruct (make model)")
def test_serving_without_engines(measured: Measured, local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    parts = importlib.import_module("serving_parts")
    for name, value in {"DATUMS": 6, "TOKENS": 40, "PASSES": 1, "LAYERS": 1, "UPDATES": 1}.items():
        monkeypatch.setattr(parts, name, value)
    numbers = ("overhead:per_million_tokens:server_cpu_s", "overhead:update:over_loop", "overhead:update:cpu_over_loop")
    found = measured("serving", "--parts", "overhead", numbers=numbers)
    assert found["overhead"]["tokens_per_s_below_the_goal"] > 0


@pytest.mark.exhaustive
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs models/SmolLM2-135M-Instruct (make model)")
def test_serving_with_engines(measured: Measured, local_ray: None, warm: None) -> None:
    sizes = {"PROMPTS": 1, "SAMPLES": 2, "NEW_TOKENS": 2, "STEPS": 1, "CLIENTS": 2, "ROUNDS": 1, "DATUM_TOKENS": 32}
    sizes["SAMPLED_TOKENS"] = 1  # more than one may end early: one layer of the model ends texts at random
    numbers = ("step:over_loop", "step:cpu_over_loop", "clients:train_wall", "clients:sample_cpu")
    found = measured("serving", "--layers", "1", "--parts", "step", "clients", **sizes, numbers=numbers)
    assert len(found["step"]["steps_by_api"]) == 1
    assert found["clients"]["tokens_per_s"].keys() == {"train, one", "train, many", "sample, one", "sample, many"}


@pytest.mark.exhaustive
@pytest.mark.needs_option("elastic")
def test_replaced_ranks(measured: Measured, local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replaced_ranks.write_prompts", sums)
    overrides = [field for field in SMALLER if not field.startswith("policy.layout")]
    found = measured("replaced_ranks", "--steps", "3", "--kills", "2", "--spares", "0", *overrides, DELAY_S=0.0)
    assert {*SETUP, "command", "setup"} <= found.keys()
    assert len(found["lost_to_resumed_s"]) == 1
    assert found["numbers_equal"]
    assert found["steps_lost"] == 0


@pytest.mark.exhaustive
@pytest.mark.needs_option("elastic_engines")
def test_elastic_engines(measured: Measured) -> None:
    numbers = ("kept", "runs:fixed:tokens_per_engine_s", "runs:elastic:engines", "join_over_own_start")
    found = measured("elastic_engines", "--steps", "12", "--engines", "2", "--period", "4", numbers=numbers)
    assert {*SETUP, "command", "setup"} <= found.keys()
    assert found["runs"]["fixed"]["engines"] == 2
    assert 1 <= found["runs"]["elastic"]["engines"] < 2
    assert all(0 < join["own_start_s"] < join["to_first_request_s"] for join in found["joins"])


@pytest.mark.exhaustive
def test_corruption(measured: Measured, warm: None) -> None:
    found = measured("corruption", TRUNCATIONS=1, FLIPS=2, numbers=("seconds",))
    assert {*SETUP, "date", "command"} <= found.keys()
    assert found["trials"] == found["detected"] == found["recovered"] > 0
    assert found["resumed_over_a_damaged_one"]


@pytest.mark.exhaustive
def test_gpu_colocated(measured: Measured, warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU and on the embedded engine, beside a driver of GPUs that says that nothing is on the only one."""
    module = importlib.import_module("gpu_colocated")
    memory = types.SimpleNamespace(total=2**30, used=2**20)
    driver = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=lambda handle: memory,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    work = module.WORKS[module.WORK]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = work.hf_config | sizes | {"num_key_value_heads": 2, "vocab_size": 128}
    monkeypatch.setitem(module.WORKS, module.WORK, type(work)(config, 4, 4, 2))
    found = measured(
        "gpu_colocated", "--steps", "3", "rollout.engine=embedded", "rollout.threads=1",
        PROMPTS=2, SAMPLES=2, PROMPT_TOKENS=8, NEW_TOKENS=4, WORDS=100, plain_copy_s=lambda nbytes: 1.0,
    )  # fmt: skip
    assert found["exit_code"] == 0
    assert {*SETUP, "work", "gpu_bytes", "plain_copy_s"} <= found.keys()
    assert found["spans"]["driver: update"]["seconds"] > 0
    assert found["metrics"][-1]["step"] == 3
    assert found["plan"]["gpu"] == "h100"
    assert {"update", "generate", "step"} <= found["plan"]["against"]["phases"].keys()
    assert found["plan"]["bytes_by_turn"].keys() == {ALL_AT_ONCE}, "the embedded engine does not sleep"


@pytest.mark.exhaustive
def test_faults(measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    few = ["--trials", "1", "--families", "plain", "--kinds", "kill engine", "--steps", "3"]
    figures = ("undisturbed_start_s:plain", "undisturbed_step_s:plain", "trial:0:wall_s", "median_wall_s", "median_cpu_s")
    found = measured("faults", *few, numbers=figures)
    assert {
        *SETUP,
        "command",
        "series",
        "date",
        "deeds",
        "targets",
        "families",
        "by_kind",
        "median_recovered_s",
    } <= found.keys()
    assert [found[name] for name in ("trials", "completed", "good")] == [1, 1, 1]


@pytest.mark.exhaustive
def test_serve_faults(measured: Measured) -> None:
    few = ["--trials", "1", "--layouts", "reference", "--kinds", "cut client"]
    found = measured("serve_faults", *few, numbers=("trial:0:wall_s", "median_wall_s"))
    assert {*SETUP, "command", "series", "date", "kinds", "by_kind", "by_layout", "start_s"} <= found.keys()
    assert [found[name] for name in ("trials", "completed", "good", "identical_adapters")] == [1, 1, 1, 1]


@pytest.mark.exhaustive
def test_soak(measured: Measured, tmp_path: Path) -> None:
    """The plain run of faults.py on the embedded engine, in place of agents on SGLang."""
    module = importlib.import_module("soak")
    of_soak, of_family = module.soak_config, module.config

    def embedded(*arguments: Any) -> dict[str, Any]:
        tree = of_soak(*arguments)
        tree["rollout"]["engine"] = "embedded"
        tree["data"]["eval"] = {"source": "jsonl", "path": str(tmp_path / "held_out.jsonl")}
        return tree

    (tmp_path / "held_out.jsonl").write_text('{"question": "Calculate 12 + 3.", "answer": "15"}\n')

    plain = {"config": lambda folder, port, steps, family: of_family(folder, port, steps, "plain"), "soak_config": embedded}
    found = measured("soak", "--minutes", "0.2", "--every-s", "0.5", **plain, numbers=("process_count:growth", "steps:1"))
    assert {*SETUP, "command", "flat", "growing", "checkpoints", "written_bytes", "shared_memory_bytes"} <= found.keys()
    assert (found["exit_code"], found["processes_left"]) == (130, 0)
    assert any(row["process"].endswith("report") for row in found["processes"])
    assert all(math.isfinite(row["memory_bytes"]["growth"]) for row in found["processes"])


@pytest.mark.exhaustive
def test_reshard(measured: Measured, tmp_path: Path) -> None:
    """SGLang on a tiny Llama."""
    from tests.rollout.tiny import TINY as LLAMA
    from tests.rollout.tiny import save_tiny

    if importlib.util.find_spec("sglang") is None:  # it cannot be imported in this process: it asks for triton
        pytest.skip("sglang is not installed")
    found = measured("reshard", "--models", "135m", "--repeats", "1", REAL=save_tiny(tmp_path / "llama", LLAMA))
    assert {*SETUP, "command", "setup"} <= found.keys()
    for way in ("shared_memory", "process_group", "rdma", "rdma_over_tcp"):
        for how in ("checked", "unchecked"):
            assert {"begin_s", "push_s", "end_s", "times_plain"} <= found["models"]["135m"][way][how].keys()
