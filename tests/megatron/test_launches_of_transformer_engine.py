"""Launches, waits and copies of passes through Transformer Engine's layers are bound by the committed table.

Their Python is the real one; what stands for their kernels is `benchmarks/engine_stand_ins.py`. Skipped where Transformer
Engine is not installed (`make test-transformer-engine`).
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest

from benchmarks.roofline import ENGINE, KINDS, OF_ENGINE, measure, regressions
from tests.world import World

pytestmark = pytest.mark.slow
TABLE = json.loads(OF_ENGINE.read_text())
"""Of these versions, whose own launches differ from others'."""
BOUND = {"megatron-core": "megatron-core", "torch": "torch", "transformer-engine": "transformer_engine"}


def measured(rank: int, world_size: int, name: str, spoiled: bool) -> dict[str, Any]:
    """Of this kind of layer under Transformer Engine; `spoiled`: each layer reads a value of the device."""
    from benchmarks.engine_stand_ins import kernels_stood_for
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout

    initialize_layout(Layout(), seed=1)
    with kernels_stood_for(), pytest.MonkeyPatch.context() as patch:
        if spoiled:
            from megatron.core.transformer.transformer_layer import TransformerLayer

            forward = TransformerLayer._forward_attention

            def waits(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
                assert hidden_states.numel() == hidden_states.isfinite().sum().item()
                return forward(self, hidden_states, *args, **kwargs)

            patch.setattr(TransformerLayer, "_forward_attention", waits)
        return {f"{name}, {ENGINE}": measure(KINDS[name], ENGINE)}


def bounded() -> None:
    for key, package in BOUND.items():
        here, there = (text.split(".")[:2] for text in (version(package), TABLE["versions"][key]))
        if here != there:
            pytest.skip(f"the table was counted under {package} {'.'.join(there)}")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.under_transformer_engine])
def test_no_kind_of_layer_asks_for_more_than_the_table_has(engine_world: World, name: str) -> None:
    bounded()
    found = engine_world.call(measured, name, False, size=1, timeout_s=500)[0]
    assert regressions(found, TABLE["parts"]) == []
    layer = found[f"{name}, {ENGINE}"]["layer"]
    assert layer["flops"] > 0.9 * layer["minimum"]["flops"]
    assert layer["launches"] < TABLE["parts"][f"{name}, {ENGINE}, before"]["layer"]["launches"]


def test_a_wait_in_a_layer_is_found_with_its_operator(engine_world: World) -> None:
    bounded()
    problems = regressions(engine_world.call(measured, "llama", True, size=1, timeout_s=500)[0], TABLE["parts"])
    waits = [problem for problem in problems if "waits of a layer were 0, are 1" in problem]
    assert len(waits) == 1
    assert "1 x _local_scalar_dense at megatron/core/transformer/" in waits[0]
