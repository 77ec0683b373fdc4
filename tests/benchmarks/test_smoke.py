"""Every benchmark runs: once, at a size that a test has time for. What it measures is not looked at, but that it writes it.

`RUN_BY` names the test of each file of benchmarks/, `PARTS` the benchmark that uses it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megarl.config import load_any
from tests.benchmarks.conftest import BENCHMARKS, at, read_strictly
from tests.data.chat_tokenizers import CHATML, byte_tokenizer
from tests.rollout.tiny import TINY, save_tiny
from tests.world import World

ROOT = BENCHMARKS.parent
Measured = Callable[..., Any]
SETUP = {"machine", "versions"}


def test_algorithms(measured: Measured) -> None:
    found = measured("algorithms", "--responses", "16", "--tokens", "16", "--rounds", "1")
    assert {*SETUP, "code", "setup", "functions"} == found.keys()
    functions = found["functions"]
    assert {"advantage/grpo", "loss/clip", "loss/clip_cov", "kl/k3", "correction/tis_token"} <= functions.keys()
    assert all(figures["ns_per_token"] > 0 and figures["over_copy"] > 0 for figures in functions.values())


def test_scaling(measured: Measured) -> None:
    found = measured("scaling", "--worlds", "16", "--rounds", "1")
    assert {*SETUP, "responses", "layout"} <= found.keys()
    parts = {"taking", "batch", "planning", "shares", "advantages", "serialising", "collection", "all"}
    assert found["worlds"].keys() == {"16"}
    for figures in found["worlds"].values():
        assert all(figures[part] > 0 for part in parts)
        assert figures["tokens"] > 100_000
        assert figures["token_bytes"] == 0
        assert 0 < figures["sent_bytes"] < 10_000 * figures["responses"]


def test_tokenising(measured: Measured, tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    found = measured("tokenising", "--model", str(tmp_path), "--rows", "3", "--rounds", "1")
    assert {*SETUP, "code", "setup", "tokens", "rows_per_s", "over_transformers"} == found.keys()
    assert found["tokens"]["transformers"] - found["tokens"]["megarl"] == 3, "the line break behind each conversation"
    assert all(rate > 0 for rate in found["rows_per_s"].values())


def test_engine_precisions(measured: Measured, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", TINY)
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    names = ["float32", "bfloat16", "keys and values in FP8"]
    sizes = ("--prompts", "2", "--n", "2", "--tokens", "4")
    found = measured("engine_precisions", "--model", str(tmp_path / "model"), *sizes, "--precisions", *names)
    assert {*SETUP, "setup", "precisions"} <= found.keys()
    rows = found["precisions"]
    assert list(rows) == names
    assert rows["float32"]["max"] < 1e-4 < rows["keys and values in FP8"]["mean_abs"] < 1
    assert all(row["tokens"] > 0 and row["k3"] >= 0 for row in rows.values())


def test_planner(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured("planner", out="--json")
    assert all(0.3 < ratio < 3 for phases in found.values() for ratio in phases.values())
    assert "steps, typical factor" in capsys.readouterr().out


def test_ready_plans(measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    marks = "".join(f"before\n<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n" for name in ("ready", "waits"))
    page.write_text(f"{marks}after\n")
    plans = tmp_path / "plans"
    plans.mkdir()
    plan = "llama-3.1-8b-grpo-8xh100"
    (plans / f"{plan}.yaml").write_text((ROOT / f"examples/plans/{plan}.yaml").read_text())
    measured("planner", "--ready", "--page", str(page), out="--json", PLANS=plans)
    assert page.read_text().count(f"| `{plan}` |") == 2
    assert "old" not in page.read_text()


def test_partial_responses(measured: Measured) -> None:
    sizes = {"STEPS": 2, "GROUPS": 2, "MORE": 1, "SAMPLES": 2, "TOKENS": 6, "WAIT_S": 0.002}
    turns = {"TURNS": 2, "PROMPT": 16, "TOLD": 8, "SAID": 4, "CONVERSATIONS": 1}
    found = measured(
        "partial_responses",
        **sizes,
        **turns,
        numbers=("partial_responses:cpu_seconds_ratio", "turn_cache:cpu_seconds_ratio", "turn_cache:kept:cache_hit_rate"),
    )
    assert {*SETUP, "command"} <= found.keys()
    assert found["partial_responses"]["restart"]["trained_tokens"] == 2 * 2 * 2 * 6
    assert found["turn_cache"]["kept"]["cached_tokens"] > found["turn_cache"]["without"]["cached_tokens"]


def test_scheduling(measured: Measured) -> None:
    sizes = {"ENGINES": 2, "GROUPS": 4, "SLOTS": 8, "STEPS": 4, "SEEDS": 1, "STALENESS": (2,), "MORE": (2,)}
    names = ("sync", "one_step_off_policy", "async, staleness 2", "async, staleness 2, by share")
    ways = ("2 of 4 more, continue", "2 of 4 more, restart")
    found = measured(
        "scheduling",
        **sizes,
        SIZES=((2, 16),),
        LENGTHS={"32k": (8192, 0.9, 32768)},
        numbers=(
            "cpu:2 engines, 16 groups:cpu_s",
            *(f"schedules:32k:{name}:of_bound" for name in names),
            *(f"over_sampling:32k:{way}:change" for way in ways),
        ),
    )
    assert {*SETUP, "command", "setup"} <= found.keys()
    assert all(0 < found["schedules"]["32k"][name]["of_bound"] < 1.2 for name in names)


def test_the_page_has_the_figures_of_the_scheduler_as_they_were_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module, page = importlib.import_module("scheduling"), ROOT / "docs/evidence/rollouts.md"
    (tmp_path / "page.md").write_text(page.read_text())
    tables = module.tables(read_strictly(BENCHMARKS / "results/scheduling.json"))
    module.put_into(tmp_path / "page.md", "scheduling", tables)
    assert (tmp_path / "page.md").read_text() == page.read_text(), "python benchmarks/scheduling.py --parts --out … --page …"


def test_serving(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    parts = importlib.import_module("serving_parts")
    for name, value in {"SHAPES": {"a layer": (8, 16, (2, 4))}, "MODELS": 3, "RANK": 2, "REPEATS": 1}.items():
        monkeypatch.setattr(parts, name, value)
    found = measured("serving", "--parts", "grouped", numbers=("grouped:cases:1:one_by_one_over_grouped",))
    assert {*SETUP, "code", "command"} <= found.keys()
    assert [(case["layer"], case["tokens"]) for case in found["grouped"]["cases"]] == [("a layer", 2), ("a layer", 4)]


def test_the_page_has_the_figures_of_the_server_as_they_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module, page = importlib.import_module("serving"), ROOT / "docs/evidence/costs.md"
    (tmp_path / "page.md").write_text(page.read_text())
    module.write_tables(tmp_path / "page.md", read_strictly(BENCHMARKS / "results/serving.json"))
    assert (tmp_path / "page.md").read_text() == page.read_text(), "python benchmarks/serving.py --parts --out … --page …"


def test_checkpoint_writing(measured: Measured) -> None:
    found = measured("checkpoint_writing", "--repeats", "1", TENSORS=2, ROWS=8, COLUMNS=64)
    assert {*SETUP, "command", "date"} <= found.keys()
    assert found["checkpoint_bytes"] == 2 * 8 * 64 * 4
    for way in ("past the page cache", "through the page cache"):
        assert found[way]["median_wall_s"] > 0
        assert {"median_cpu_s", "median_machine_kernel_s"} <= found[way].keys()


@pytest.mark.needs_option("elastic")
def test_memory_copies(measured: Measured) -> None:
    found = measured("memory_copies", "--repeats", "1", TENSORS=2, ROWS=8, COLUMNS=64)
    assert {*SETUP, "command", "date"} <= found.keys()
    for way in ("in place", "copied, and into new files"):
        assert 2 * 8 * 64 * 4 < found[way]["bytes"] < 2 * 8 * 64 * 4 + 2048
        assert len(found[way]["wall_s"]) == len(found[way]["cpu_s"]) == 1


def test_reshard_plan(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("reshard_plan")
    found = measured(
        "reshard_plan",
        "--rounds",
        "1",
        WORLDS=(64,),
        repeated=lambda case, world, rounds: module.measure(case, world),
        numbers=tuple(f"plans:70b:64:{name}" for name in (*module.STAGES, "cpu_s", "peak_mib", "predicted_s", "redundancy")),
    )
    assert {*SETUP, "command", "rounds"} <= found.keys()


def test_update_checks(measured: Measured) -> None:
    found = measured("update_checks", "--cases", "70b", "--worlds", "64", "--rounds", "1")
    assert {*SETUP, "command", "date", "rounds"} <= found.keys()
    figures = found["checks"]["70b"]["64"]
    assert figures["engines"] == 8
    assert figures["bytes_from_ranks"] < figures["bytes_by_box_of_all"] / 10
    assert figures["boxes"] > figures["boxes_of_rank"] > 0


def test_group_calls(measured: Measured) -> None:
    found = measured("group_calls", "--ranks", "16", "--by-node", "16", "--rounds", "1")
    assert {*SETUP, "command", "date", "calls_of_a_step"} <= found.keys()
    for kind in ("by_rank", "by_node"):
        assert found[kind]["16"].keys() == {"submit_s", "wait_s", "behind_s", "step_s"}
        assert found[kind]["16"]["behind_s"] < 30


def test_update_network(measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    page = tmp_path / "weight_updates.md"
    page.write_text("before\n<!-- network: begin -->\nold\n<!-- network: end -->\nafter\n")
    figures = ("busiest_s", "played_s", "planned_s", "by_number_s", "relay_cpu_s")
    numbers = tuple(f"runs:Llama 70B on 64:{name}" for name in figures)
    found = measured("update_network", "--cases", "Llama 70B on 64", "--docs", str(page), numbers=numbers)
    assert {*SETUP, "command", "date"} <= found.keys()
    assert "| Llama 70B on 64 | 8 of 8 |" in page.read_text()


@pytest.mark.needs_option("state_spaces")
@pytest.mark.slow
def test_state_spaces(measured: Measured) -> None:
    found = measured("state_spaces", "--tokens", "64", "--sequences", "1", "--rounds", "1", "--models", "granite-4.0-h-tiny")
    assert {"code", "machine", "models"} <= found.keys()


@pytest.mark.slow
def test_log_probs(measured: Measured) -> None:
    sizes = ["--tokens", "64", "--vocab", "512", "--hidden", "16", "--heads", "megarl"]
    found = measured("log_probs", *sizes)
    assert {*SETUP, "command", "setup"} <= found.keys()
    figures = {"peak_extra_bytes", "share_of_full_logits", "forward_s", "backward_s", "worst_error_nats"}
    assert figures <= found["heads"]["megarl"].keys()
    assert found["heads"]["megarl"]["worst_error_nats"] < 1e-4


def convert_here(what: str, source: Path, target: Path, arguments: Any, *, memory: bool) -> dict[str, float]:
    """`convert.measured` in this process."""
    import convert

    given = vars(arguments) | {"what": what, "source": source, "target": target, "memory": memory}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        convert.measure_here(argparse.Namespace(**given))
    return json.loads(said.getvalue()) | {"process_s": 1.0}


@pytest.mark.slow
def test_convert(measured: Measured) -> None:
    figures = ("seconds", "cpu_s", "process_s", "peak_mib", "gb_per_s", "share_of_plain")
    found = measured(
        "convert", "--model", "tiny", "--rounds", "1", "--workers", "1",
        measured=convert_here, numbers=tuple(f"medians:{what}:{n}" for what in ("plain", "import", "export") for n in figures),
    )  # fmt: skip
    assert {*SETUP, "settings", "bytes", "rounds"} <= found.keys()


def main_of(rank: int, world_size: int, name: str, arguments: list[str], constants: dict[str, Any]) -> None:
    """The benchmark's `main` in a rank of the world, in place of the world of one that it would start."""
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout

    initialize_layout(Layout(), seed=1)
    module = importlib.import_module(f"benchmarks.{name}")
    with (
        mock.patch.multiple(module, start=lambda: None, **constants),
        mock.patch.object(sys, "argv", [f"benchmarks/{name}.py", *arguments]),
    ):
        module.main()


def test_roofline(world: World, tmp_path: Path) -> None:
    out = tmp_path / "roofline.json"
    world.call(main_of, "roofline", ["--only", "llama", "--out", str(out)], {}, size=1)
    found = read_strictly(out)
    assert {*SETUP, "command", "code"} <= found.keys()
    one = found["parts"]["llama, reference"]
    for part in ("layer", "micro_batch"):
        assert {"launches", "waits", "copies", "flops", "bytes", "places"} <= one[part].keys()
        assert one[part]["flops"] > 0


def part_of(rank: int, world_size: int, part: str, out: Path) -> None:
    """A part of gpu_paths at a test's size, in a rank of the world."""
    module = importlib.import_module("benchmarks.gpu_paths")
    with mock.patch.object(sys, "argv", ["benchmarks/gpu_paths.py", part, "--smoke", "--out", str(out)]):
        module.main()


GPU_PARTS = {
    "adapters": ("dense:adapters:step_s", "experts:adapters:step_s"),
    "deterministic": ("running sums:apart_from_plain", "delta rule:apart_from_plain"),
    "few_bits": ("fp8-block, in turn:s", "mxfp8, in turn:s"),
    "ipc": ("checksum_s",),
    "logits": ("apart_from_float64", "s"),
    "muon": ("muon:step_s",),
    "offload": ("bf16:leaves_s", "bf16:comes back_s"),
    "replay": ("chosen:step_s", "replayed:step_s"),
    "shared_prefixes": ("for each:step_s", "once:step_s"),
    "tower": ("s",),
}
"""Parts that a CPU runs, and numbers that each finds."""


@pytest.mark.parametrize("part", GPU_PARTS)
def test_gpu_paths(part: str, world: World, tmp_path: Path) -> None:
    world.call(part_of, part, tmp_path / "found.json", size=1)
    found = read_strictly(tmp_path / "found.json")
    assert {*SETUP, "code", "command", "device", "s", "found"} == found.keys()
    for path in GPU_PARTS[part]:
        assert at(found["found"], path) >= 0
    assert "false" not in json.dumps(found["found"]), "what is computed twice is alike"


def test_gpu_paths_ask_tests_that_skip_themselves(tmp_path: Path) -> None:
    out = tmp_path / "tests.json"
    command = [sys.executable, "benchmarks/gpu_paths.py", "tests", "--select", "test_sglang.py::fp8", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    outcomes = {name.rpartition("::")[2]: one["outcome"] for name, one in read_strictly(out)["found"]["tests"].items()}
    assert outcomes == {"test_an_engine_in_fp8_takes_updates_before_and_after_it_has_slept": "skipped"}


def test_every_line_for_a_lent_gpu_is_a_part_with_its_own_json_that_ends_in_time() -> None:
    gpu_paths = importlib.import_module("benchmarks.gpu_paths")
    of_gpu = importlib.import_module("benchmarks.gpu").parts_for((9, 0), "13.0", has_transformer_engine=True)
    lines = [line.split(maxsplit=3) for line in (BENCHMARKS / "gpu_parts.txt").read_text().splitlines() if line[:1] != "#"]
    assert len({name for name, *_ in lines}) == len(lines) > 15
    asked = set()
    for name, limit, least, command in lines:
        assert 0 < int(least) <= int(limit) <= 90, name
        words = shlex.split(command)
        assert words[0] == "python3"
        assert words[-2] == "--out"
        assert words[-1].startswith("$OUT/")
        assert words[-1].endswith(".json")
        if words[1] == "benchmarks/gpu_paths.py":
            assert words[2] in gpu_paths.PARTS
            asked.add(words[2])
        else:
            assert words[1] == "benchmarks/gpu.py"
            assert any(words[words.index("--only") + 1] in part.name for part in of_gpu), name
        if words[2] == "tests":
            file, _, chosen = words[4].partition("::")
            text = (ROOT / "tests/themes/gpu" / file).read_text()
            assert all(one in text for one in chosen.split(" or "))
    assert asked == {*gpu_paths.PARTS} == {*GPU_PARTS, "tests"}


def test_head_memory(world: World, tmp_path: Path) -> None:
    out = tmp_path / "head_memory.json"
    sizes = {"TOKENS": 64, "VOCABULARY": 4096, "HIDDEN_SIZES": (32,), "POINTS": (32, 48, 64), "CHUNKS": (64, 4096)}
    sizes["TIMED"] = {"tokens": 16, "vocab": 4096, "hidden": 16}
    world.call(main_of, "head_memory", ["--rounds", "1", "--out", str(out)], sizes, size=1)
    found = read_strictly(out)
    assert {*SETUP, "command", "code", "setup"} <= found.keys()
    heads = {"megarl on a GPU, bfloat16", "Liger on a GPU, bfloat16", "megarl on a CPU, float32", "full on a CPU, float32"}
    of_size = found["memory"]["hidden size 32"]
    assert heads <= of_size.keys()
    assert all(figures["of float32 logits"] > 0 for figures in of_size.values())
    assert all(figures["ratio"] > 0 for figures in found["times"].values())


def test_planning_memory(measured: Measured, world: World) -> None:
    module = importlib.import_module("planning_memory")
    few = types.SimpleNamespace(CASES=module.test_memory.CASES[:1], measured=module.test_memory.measured)
    found = measured(
        "planning_memory", "--ranks", "1",
        test_memory=few, test_tower_memory=types.SimpleNamespace(CASES=[], measured=None),
        World=lambda ranks: contextlib.nullcontext(world),
    )  # fmt: skip
    assert {"date", "command", "versions"} <= found.keys()
    [row] = found["rows"]
    assert row["planned"].keys() == row["measured"].keys() == {*module.PARTS}


def test_failures_at_scale(measured: Measured, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- failures_at_scale: begin -->\n<!-- failures_at_scale: end -->\nafter\n")
    few = ("--days", "3", "--seeds", "1", "--replicas", "8", "--only", "today, save_every 10", "spares 32")
    found = measured("failures_at_scale", *few, "--page", str(page))
    assert found["interruptions"] == 419
    lost = {row["name"]: row["mean"]["lost"] for row in found["scenarios"]}
    assert 0 < lost["spares 32"] < lost["today, save_every 10"] < 1
    assert all(assumed["why"] for assumed in found["assumed"].values())
    assert "| spares 32 | **" in page.read_text()


def test_learning_curve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [tmp_path / name for name in ("first", "second")]
    for run in runs:
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in (1, 2)))
    monkeypatch.setattr(sys, "argv", ["learning_curve.py", str(tmp_path / "curve.png"), *map(str, runs)])
    importlib.import_module("benchmarks.learning_curve").main()
    assert (tmp_path / "curve.png").stat().st_size > 0


def pretend_to_learn(command: list[str]) -> None:
    """Stand in for a command that takes minutes: it loads the config that it names."""
    if command[1:3] != ["-m", "megarl"]:
        return
    run = Path(load_any(ROOT / command[4], command[5:]).run_folder)
    run.mkdir(parents=True)
    row = {"step": 1, "reward/mean": 0.5, "mismatch/log_prob_max": 1e-6}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    summary = {"eval": {"before": {"accuracy": 0.2}, "after": {"accuracy": 0.8}}, "steps": 1}
    (run / "summary.json").write_text(json.dumps(summary | {"seconds_per_step": 1.0, "gates": {}}))


def test_learning_to_hear(measured: Measured) -> None:
    found = measured("learning_to_hear", "--seeds", "1", call=pretend_to_learn)
    assert found.keys() >= SETUP
    assert [run["held_out_accuracy"] for run in found["runs"]] == [{"0": 0.2, "1": 0.8}] * 2


def test_learning_to_see(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "vision.png"
    found = measured("learning_to_see", "--seeds", "1", "--picture", str(picture), call=pretend_to_learn)
    assert found.keys() >= SETUP
    assert len(found["runs"]) == 5
    assert all(run["held_out_accuracy"] == {"0": 0.2, "1": 0.8} for run in found["runs"])
    assert picture.stat().st_size > 0


def test_against_trl(measured: Measured) -> None:
    """With the recorded steps of both sides: TRL has an environment of its own."""
    recorded = json.loads((BENCHMARKS / "results/against_trl.json").read_text())
    sides = {side: {name: recorded[side][name] for name in ("steps", "versions")} for side in ("trl", "megarl")}
    found = measured(
        "against_trl",
        run_trl=lambda *given: sides["trl"],
        run_megarl=lambda *given: sides["megarl"],
        numbers=("trl:samples_per_s", "trl:median:generate_s", "megarl:samples_per_s"),
    )  # fmt: skip
    assert {"work", "machine"} <= found.keys()
    assert found["megarl_over_trl"] == pytest.approx(recorded["megarl_over_trl"])


TRL = """
import torch


class GRPOConfig:
    def __init__(self, **given):
        self.optim = "adamw_torch"
        self.__dict__.update(given)


class GRPOTrainer:
    def __init__(self, model, reward_funcs, args, train_dataset, callbacks):
        self.args, self.rows, self.callbacks = args, train_dataset, callbacks
        self.model = torch.nn.Linear(1, 1)
        self.num_generations, self.max_completion_length = args.num_generations, args.max_completion_length
        self.loss_type, self.beta = "dapo", args.beta

    def train(self):
        for _ in range(self.args.max_steps):
            for callback in self.callbacks:
                callback.on_step_begin()
            prompts = [[1, 2, 3]] * self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
            self._generate_single_turn(prompts)
            for callback in self.callbacks:
                callback.on_step_end()

    def _generate_single_turn(self, prompt_ids):
        return [[0] * self.max_completion_length] * len(prompt_ids), None
"""
DATASETS = """
class Dataset(list):
    @classmethod
    def from_list(cls, rows):
        return cls(rows)
"""


def test_trl_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With stand-ins for TRL and datasets, which have an environment of their own: they generate at once and learn nothing."""
    (tmp_path / "trl.py").write_text(TRL)
    (tmp_path / "datasets.py").write_text(DATASETS)
    for name in ("trl", "datasets", "accelerate"):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    rows.write_text('{"prompt": [{"role": "user", "content": "1 + 2"}]}\n' * 4)
    command = [sys.executable, str(BENCHMARKS / "trl_reference.py"), str(rows), "--model", str(tmp_path), "--out", str(out)]
    command += ["--steps", "2", "--prompts", "2", "--samples", "2", "--new-tokens", "3", "--micro-batch", "2"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=300)
    found = read_strictly(out)
    assert [step["response_tokens"] for step in found["steps"]] == [12, 12]
    assert [step["prompt_tokens"] for step in found["steps"]] == [12, 12]
    assert found["settings"]["samples_per_prompt"] == 2
    assert found["versions"].keys() == {"trl", "transformers", "torch", "accelerate", "datasets"}


ATHERIS = """
import contextlib
import sys


@contextlib.contextmanager
def instrument_imports(include, enable_loader_override):
    yield


def Setup(arguments, one):
    global run
    run = one


def Fuzz():
    for data in (b"", b"run: {}", b"{"):
        run(data)
    print("#3 DONE cov: 5 ft: 7", flush=True)
    sys.exit(0)
"""


@pytest.mark.slow
def test_fuzz(measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for atheris, which not every machine can install: it knows three inputs."""
    (tmp_path / "atheris.py").write_text(ATHERIS)
    (tmp_path / "atheris-3.0.0.dist-info").mkdir()
    (tmp_path / "atheris-3.0.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: atheris\nVersion: 3.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    found = measured("fuzz", "--seconds", "7", "--targets", "config")
    assert {*SETUP, "command"} <= found.keys()
    target = found["targets"]["config"]
    assert target["executions"] % 3 == 0 < target["executions"]
    assert (target["covered_blocks"], target["features"], target["findings"]) == (5, 7, [])


@pytest.mark.slow
def test_the_kernels_of_a_step_are_listed(tmp_path: Path) -> None:
    listed = tmp_path / "kernels.txt"
    done = subprocess.run(
        [sys.executable, "-c", KERNELS, str(BENCHMARKS), str(listed)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "aten::" in listed.read_text()
    assert "kernels" in listed.read_text().splitlines()[-1]


KERNELS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gpu
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8)
gpu.WORKS["8b"] = gpu.Work(gpu.LLAMA | sizes | {"tie_word_embeddings": False}, 6, 5, 2)
gpu.WARMUP_STEPS = 1
file = Path(sys.argv[2])
gpu.write_models(["8b"], file.parent)
gpu.list_kernels(gpu.Part("bf16, reference layers", "reference"), file.parent, file)
"""

HERE, OF_RUNS = "tests/benchmarks/test_smoke.py", "tests/benchmarks/test_smoke_of_runs.py"
RUN_BY = {
    "against_trl": f"{HERE}::test_against_trl",
    "algorithms": f"{HERE}::test_algorithms",
    "async_rollouts": f"{OF_RUNS}::test_async_rollouts",
    "bad_input": "tests/themes/security/test_bad_input.py::test_bad_input_is_one_sentence_and_nothing_else",
    "budget": "tests/test_budget.py::test_a_layer_asks_for_what_the_table_has",
    "checkpoint_cost": f"{OF_RUNS}::test_checkpoint_cost",
    "checkpoint_writing": f"{HERE}::test_checkpoint_writing",
    "convert": f"{HERE}::test_convert",
    "corruption": f"{OF_RUNS}::test_corruption",
    "distillation": f"{OF_RUNS}::test_distillation",
    "elastic_engines": f"{OF_RUNS}::test_elastic_engines",
    "failures_at_scale": f"{HERE}::test_failures_at_scale",
    "faults": f"{OF_RUNS}::test_faults",
    "fuzz": f"{HERE}::test_fuzz",
    "gpu": "tests/test_gpu_benchmark.py::test_without_a_gpu_nothing_runs_and_the_record_says_so",
    "gpu_colocated": f"{OF_RUNS}::test_gpu_colocated",
    "gpu_paths": f"{HERE}::test_gpu_paths",
    "group_calls": f"{HERE}::test_group_calls",
    "head_memory": f"{HERE}::test_head_memory",
    "learning": f"{OF_RUNS}::test_learning",
    "learning_curve": f"{HERE}::test_learning_curve",
    "learning_to_see": f"{HERE}::test_learning_to_see",
    "learning_to_hear": f"{HERE}::test_learning_to_hear",
    "log_probs": f"{HERE}::test_log_probs",
    "memory_copies": f"{HERE}::test_memory_copies",
    "partial_responses": f"{HERE}::test_partial_responses",
    "planner": f"{HERE}::test_planner",
    "planning_memory": f"{HERE}::test_planning_memory",
    "redaction": f"{OF_RUNS}::test_redaction",
    "replaced_ranks": f"{OF_RUNS}::test_replaced_ranks",
    "reshard": f"{OF_RUNS}::test_reshard",
    "reshard_plan": f"{HERE}::test_reshard_plan",
    "roofline": f"{HERE}::test_roofline",
    "scaling": f"{HERE}::test_scaling",
    "scheduling": f"{HERE}::test_scheduling",
    "serve_faults": f"{OF_RUNS}::test_serve_faults",
    "serving": f"{HERE}::test_serving",
    "served_recipes": "tests/themes/e2e/test_cookbook.py::test_a_recipe_ends_and_learns",
    "served_curves": "tests/benchmarks/test_served_curves.py::test_served_curves",
    "served_supervised": "tests/benchmarks/test_served_supervised.py::test_served_supervised",
    "soak": f"{OF_RUNS}::test_soak",
    "speculative": f"{OF_RUNS}::test_speculative",
    "state_spaces": f"{HERE}::test_state_spaces",
    "step": f"{OF_RUNS}::test_step",
    "engine_precisions": f"{HERE}::test_engine_precisions",
    "tokenising": f"{HERE}::test_tokenising",
    "update_checks": f"{HERE}::test_update_checks",
    "trl_reference": f"{HERE}::test_trl_reference",
    "update_network": f"{HERE}::test_update_network",
}
PARTS = {
    "bad_input_cases": "bad_input", "engine_stand_ins": "roofline", "fault_runs": "faults", "fault_trials": "faults",
    "launches": "roofline", "learning_twice": "learning", "live_bytes": "head_memory", "measured_code": "step",
    "paced_engine": "async_rollouts", "pages": "scheduling", "recipe_model": "served_recipes", "recipe_rows": "served_recipes",
    "reference_server": "serve_faults", "serve_fault_runs": "serve_faults", "serve_fault_trials": "serve_faults",
    "served_curves_judge": "served_curves", "served_curves_model": "served_curves",
    "served_supervised_judge": "served_supervised", "serving_parts": "serving", "serving_rows": "serving",
    "virtual_ranks": "failures_at_scale", "warm_servers": "serve_faults", "workload": "step",
}  # fmt: skip
WITHOUT_FIGURES = {"learning_curve": "it draws a picture", "planner": "its tables follow from the planner, not from a machine"}


def test_every_benchmark_is_run() -> None:
    files = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert files == {*RUN_BY, *PARTS}
    assert {*PARTS.values()} <= {*RUN_BY}
    for test in RUN_BY.values():
        file, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(), test


def test_every_benchmark_with_figures_says_what_it_measures() -> None:
    from benchmarks.measured_code import MEASURES

    assert {*MEASURES} == {*RUN_BY} - {*WITHOUT_FIGURES, "trl_reference"}  # which is measured by against_trl
    for places in MEASURES.values():
        for place in places:
            assert (ROOT / place).exists(), f"benchmarks/measured_code.py names {place}, which is not there"
