"""What a training pass asks of its device does not grow unseen: launches, waits and copies are bound by the committed table."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest
import torch

from benchmarks.launches import counting, in_main_memory, standing_for
from benchmarks.roofline import KINDS, RESULTS, measure, regressions
from tests.world import World

TABLE = json.loads(RESULTS.read_text())
"""Of these versions of megatron-core and torch, whose own launches differ from others'."""


def test_operators_are_launches_and_views_are_none() -> None:
    left, right = torch.ones(4, 8), torch.ones(8, 3)
    with counting() as counts:
        (left @ right).view(12)[2:].relu()
    read_and_written = 4 * (32 + 24 + 12) + 4 * (10 + 10)
    launched = {"launches": 2, "waits": 0, "copies": 0, "collectives": 0}
    assert counts.totals() == {**launched, "flops": 2 * 4 * 8 * 3, "bytes": read_and_written}


def test_backward_passes_are_counted_and_named() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    with counting() as counts:
        loss.backward()
    assert counts.launches["mul at the backward pass of MulBackward"] == 1
    assert counts.totals()["waits"] == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: bool(tensor.sum() > 0),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.masked_select(tensor > 0),
        lambda tensor: torch.cuda.synchronize(),
    ],
    ids=["item", "bool", "tolist", "cpu", "numpy", "nonzero", "mask", "masked_select", "synchronize"],
)
def test_what_waits_for_the_device_is_a_wait(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with counting() as counts:
        wait(torch.ones(3))
    assert counts.totals()["waits"] == 1


def test_what_stands_for_kernels_counts_as_it_says_and_not_what_it_computes_with() -> None:
    kernel = standing_for(2, lambda given: given * given + 1, "kernel", lambda result, given: 7)
    outer = standing_for(lambda given: len(given), lambda given: kernel(given) * 2, "outer")
    given = torch.ones(4)
    with counting() as counts:
        kernel(given)
        outer(given)
    kernel(given)
    launched = {"launches": 2 + 4, "waits": 0, "copies": 0, "collectives": 0}
    assert counts.totals() == {**launched, "flops": 7, "bytes": 2 * 2 * 16}


def test_a_copy_in_main_memory_is_read_without_a_wait() -> None:
    with counting() as counts:
        copy = in_main_memory(torch.ones(3))
        assert copy.tolist() == [1.0, 1.0, 1.0]
        assert torch.tensor([2, 3], device="cpu").tolist() == [2, 3]
    assert counts.totals()["waits"] == counts.totals()["copies"] == 0


def measured(rank: int, world_size: int, name: str, spoiled: bool) -> dict[str, Any]:
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.norms import ReferenceRMSNorm

    initialize_layout(Layout(), seed=1)
    plain = ReferenceRMSNorm.forward

    def waits(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.sum().item() == hidden.sum().item()
        return plain(self, hidden)

    if spoiled:
        ReferenceRMSNorm.forward = waits  # type: ignore[method-assign]
    try:
        return {f"{name}, reference": measure(KINDS[name], "reference")}
    finally:
        ReferenceRMSNorm.forward = plain  # type: ignore[method-assign]


def bounded() -> None:
    for package, counted in (("megatron-core", 2), ("torch", 2)):
        here, there = (text.split(".")[:counted] for text in (version(package), TABLE["versions"][package]))
        if here != there:
            pytest.skip(f"the table was counted under {package} {'.'.join(there)}")


@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.exhaustive) for name in KINDS]
)
def test_a_kind_of_layer_asks_for_what_the_table_has(world: World, name: str) -> None:
    """No more, and no less: else the docs' table says what was once."""
    bounded()
    found = world.call(measured, name, False, size=1, timeout_s=300)[0]
    assert regressions(found, TABLE["parts"]) == []
    assert regressions({key: TABLE["parts"][key] for key in found}, found) == []
    one = found[f"{name}, reference"]
    assert one["layer"]["flops"] > 0.9 * one["layer"]["minimum"]["flops"]


@pytest.mark.slow
def test_a_wait_in_a_layer_is_found_with_its_operator_and_place(world: World) -> None:
    bounded()
    problems = regressions(world.call(measured, "llama", True, size=1, timeout_s=300)[0], TABLE["parts"])
    layer = [problem for problem in problems if "waits of a layer were 0, are 4" in problem]
    assert len(layer) == 1
    for place in ("_forward_attention", "_forward_pre_mlp_layernorm"):
        assert f"2 x _local_scalar_dense at megatron/core/transformer/transformer_layer.py:{place}" in layer[0]
