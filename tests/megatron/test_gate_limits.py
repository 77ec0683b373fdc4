"""Limits of gates: where a gate is clamped before SiLU, and what has no place to be clamped at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.errors import LayoutError
from megarl.megatron.gate_limits import _clamp, silu_inverse
from megarl.models.packings import GroupedQKV


@pytest.mark.parametrize("value", [1e-3, 0.3, 1.0, 7.0, 16.0, 100.0])
def test_silu_of_the_place_is_the_limit(value: float) -> None:
    place = torch.tensor(silu_inverse(value), dtype=torch.float64)
    assert torch.nn.functional.silu(place).item() == pytest.approx(value, rel=1e-14)


def test_a_layer_is_clamped_as_silu_and_what_it_multiplies_are_behind_it() -> None:
    layer = torch.nn.Module()
    layer.forward = lambda hidden: (hidden, None)  # type: ignore[method-assign, assignment]
    _clamp([SimpleNamespace(linear_fc1=layer)], 0.7)
    hidden = torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    gate, up = layer(hidden)[0].chunk(2, dim=-1)
    expected, of_up = hidden.chunk(2, dim=-1)
    torch.testing.assert_close(torch.nn.functional.silu(gate), torch.nn.functional.silu(expected).clamp(max=0.7))
    assert torch.equal(up, of_up.clamp(-0.7, 0.7))


def test_experts_without_a_linear_layer_are_refused() -> None:
    with pytest.raises(LayoutError, match="this model clamps what its experts compute, which SimpleNamespace has no layer for"):
        _clamp([SimpleNamespace()], 7.0)


def test_gates_of_heads_lie_behind_the_heads_of_their_group() -> None:
    packing = GroupedQKV(4, 2, 8, 32, gate_apart=True, gate_rows=1)
    assert packing.hf_shapes == ((32, 32), (16, 32), (16, 32), (4, 32))
    assert packing.runs(1, 2, None) == [(0, 16, 32), (3, 2, 4), (1, 8, 16), (2, 8, 16)]
