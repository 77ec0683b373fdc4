"""Models of a server in plans: bytes as dense formulas have them, in main memory and on the engines' GPUs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from megarl.config import load_any
from megarl.options.serve.times import stated
from megarl.planning.gpus import gpu_named
from megarl.planning.plan import CapacityPlan, make_plan
from megarl.planning.show import plan_tables
from tests.docs.pages import DOCS, blocks

ROOT = Path(__file__).parents[3]
LARGE = ROOT / "examples/serve/llama-3.1-70b.yaml"
LAYERS, HIDDEN, KEYS, INNER, VOCABULARY = 80, 8192, 1024, 28672, 128256


def plan_of(*overrides: str) -> CapacityPlan:
    folder = f"model.path={ROOT / 'examples/models/llama-3.1-70b'}"
    return make_plan(load_any(LARGE, [folder, *overrides]), gpu_named("h100"))


def parameters_of_adapters(rank: int, tp: int) -> int:
    """Of a rank: A is whole beside layers split by outputs, B beside those split by inputs; B of the output layer is split."""
    attention = 3 * HIDDEN + (HIDDEN + 2 * KEYS) // tp + HIDDEN // tp + HIDDEN
    mlp = 2 * (HIDDEN + INNER // tp) + INNER // tp + HIDDEN
    return rank * (LAYERS * (attention + mlp) + HIDDEN + VOCABULARY // tp)


def test_ranks_keep_live_models_in_main_memory() -> None:
    """A bfloat16 adapter, its gradient in float32, a float32 copy and two moments: 18 bytes for each parameter."""
    few, many = (plan_of(f"serve.live_models={count}") for count in (10, 30))
    trainer = [plan.memory.gpus[0].host for plan in (few, many)]
    assert trainer[1] - trainer[0] == 20 * 18 * parameters_of_adapters(32, tp=4)
    assert few.memory.gpus[0].total == many.memory.gpus[0].total, "one model has its place on the GPU"


@pytest.mark.parametrize(("live", "places"), [(3, 4), (64, 9)])
def test_engines_have_places_for_adapters_of_one_pass_and_keep_all_in_main_memory(live: int, places: int) -> None:
    plan = plan_of(f"serve.live_models={live}")
    engine = plan.memory.gpus[-1]
    assert engine.parts[("engine", "adapters")] == places * 2 * parameters_of_adapters(32, tp=4)
    assert engine.host == live * 2 * parameters_of_adapters(32, tp=1)


def test_the_example_fits_and_says_what_a_model_takes() -> None:
    plan = plan_of()
    assert plan.fits
    one = 18 * parameters_of_adapters(32, tp=4) / 1e9
    assert f"A model at the highest rank takes {one:,.3g} GB of a rank's main memory" in stated(plan)[0]
    assert f"64 live ones take {64 * one:,.3g} and" in stated(plan)[0]
    assert stated(plan)[0] in plan_tables(plan, "m")


def test_the_page_shows_the_plan_of_the_example() -> None:
    of_page = blocks(DOCS / "serve.md")
    (at,) = [number for number, block in enumerate(of_page) if block.text == "megarl plan examples/serve/llama-3.1-70b.yaml\n"]
    console = Console(width=400, file=io.StringIO())
    for part in plan_tables(plan_of(), "examples/models/llama-3.1-70b"):
        console.print(part)
    said = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    shown = of_page[at + 1].text.splitlines()
    assert len(shown) == 3
    assert [line for line in shown if line.split() not in said] == []


def test_other_runs_are_planned_as_before() -> None:
    path = ROOT / "examples/lora/llama-3.1-70b-grpo-8xh100.yaml"
    plan = make_plan(load_any(path, [f"model.path={ROOT / 'examples/models/llama-3.1-70b'}"]), gpu_named("h100"))
    assert stated(plan) == []
    assert plan.run.engines is not None
    assert (plan.run.engines.adapter_places, plan.run.engines.kept_bytes) == (2, 0)
