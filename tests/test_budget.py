"""What a rank asks of its GPU, with and without options, is what the committed table says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch

from benchmarks.budget import CELLS, RESULTS, differences
from tests.world import World

pytestmark = pytest.mark.slow
TABLE = json.loads(RESULTS.read_text())
COUNTED_IN_EACH_RUN = [("llama", "adapters")]


@pytest.fixture(scope="module")
def gpu_world() -> Iterator[World]:
    """One process that is told that it has a GPU."""
    with World(1, first="tests.pretended_gpu") as own:
        yield own


def measured(rank: int, world_size: int, kind: str, option: str, spoiled: bool) -> dict[str, Any]:
    """Of this cell; `spoiled`: each norm reads a value of the GPU."""
    from benchmarks.budget import measure
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.norms import ReferenceRMSNorm
    from tests.pretended_gpu import the_gpu

    plain = ReferenceRMSNorm.forward

    def reads(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.sum().item() is not None
        return plain(self, hidden)

    with the_gpu(), pytest.MonkeyPatch.context() as patch:
        initialize_layout(Layout(), seed=1)
        if spoiled:
            patch.setattr(ReferenceRMSNorm, "forward", reads)
        return {f"{kind}, {option}": measure(kind, option)}


def bounded() -> None:
    for package in ("megatron-core", "torch"):
        here, there = (text.split(".")[:2] for text in (version(package), TABLE["versions"][package]))
        if here != there:
            pytest.skip(f"the table was counted under {package} {'.'.join(there)}")


def test_the_table_has_every_kind_of_layer_under_every_option_that_is_for_it() -> None:
    assert TABLE["parts"].keys() == {f"{kind}, {option}" for kind, option in CELLS}
    for cell, parts in TABLE["parts"].items():
        assert parts["training"]["launches"] > parts["scoring"]["launches"] > 0, cell


def test_layers_without_experts_never_wait_for_the_gpu() -> None:
    for cell, parts in TABLE["parts"].items():
        if cell.startswith(("llama", "qwen3,", "qwen3_5")):
            assert "waits" not in parts["scoring"], cell
            assert "waits" not in parts["training"], cell


@pytest.mark.parametrize(
    ("kind", "option"),
    [cell if cell in COUNTED_IN_EACH_RUN else pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in CELLS],
)
def test_a_layer_asks_for_what_the_table_has(gpu_world: World, kind: str, option: str) -> None:
    bounded()
    found = gpu_world.call(measured, kind, option, False, timeout_s=500)[0]
    assert differences(found, TABLE["parts"]) == []


def test_a_wait_in_a_layer_is_found_with_its_place(gpu_world: World) -> None:
    bounded()
    problems = differences(gpu_world.call(measured, "llama", "plain", True, timeout_s=500)[0], TABLE["parts"])
    training = [problem for problem in problems if "waits of training were 0, are 2" in problem]
    assert len(training) == 1
    assert "waits at _local_scalar_dense at " in training[0]
