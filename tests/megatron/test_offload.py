"""A role that gives up its memory and takes it back goes on as if nothing had been; in between it has none."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.megatron.moving_average import MovingAverage
from megarl.models.shape import ModelShape
from megarl.models.weight_map import BoundRule
from tests.families import build_folder
from tests.world import World


def plain_role(layer: torch.nn.Module) -> SimpleNamespace:
    """A role of one layer that nothing trains or averages."""
    return SimpleNamespace(chunks=[layer], optimizer=None, average=MovingAverage())


def bytes_held(offload: Any) -> dict[str, int]:
    """What the role's storages take now, by kind."""
    return {kind: sum(t.untyped_storage().nbytes() for t, _ in offload._tensors(kind)) for kind in ("weights", "rest")}


def trained(rank: int, world_size: int, folder: Path, layout: Layout, dtype: str) -> tuple[Any, Any, list[dict[str, int]]]:
    """Everything after three updates, with the memory given up in different orders in between or not, and what was held."""
    from megarl.megatron.offload import Offload
    from tests.megatron.moments import everything, role_in, update

    found, held = [], []
    role, offload = None, None
    for gives_way in (False, True):
        if role is not None:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        role = role_in(layout, folder, dtype)
        offload = Offload(role, device_type="cpu")
        for number in range(3):
            update(role, rank)
            if gives_way:
                held.append(bytes_held(offload))
                steps = [(True, False), (False, False), (True, False)] if number else [(False, False)]
                for weights, rest in steps:
                    offload.keep(weights=weights, rest=rest)
                    held.append(bytes_held(offload))
                offload.keep(weights=True, rest=True)
        found.append(everything(role))
    return found[0], found[1], held


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [("llama", Layout(tp=2), "float32"), ("mixtral", Layout(dp=2, ep=2), "bfloat16")],
)
def test_a_role_goes_on_to_the_bit_after_its_memory_was_given_up(
    world: World, tmp_path: Path, family: str, layout: Layout, dtype: str
) -> None:
    build_folder(family, tmp_path / "model")
    for plain, offloaded, held in world.call(trained, tmp_path / "model", layout, dtype, size=2):
        assert plain.keys() == offloaded.keys()
        for name, tensor in plain.items():
            assert torch.equal(tensor, offloaded[name]), name
        whole = held[0]
        assert min(whole.values()) > 0
        weights_alone, nothing = {"weights": whole["weights"], "rest": 0}, {"weights": 0, "rest": 0}
        assert held == [
            whole,
            nothing,
            whole,
            weights_alone,
            nothing,
            weights_alone,
            whole,
            weights_alone,
            nothing,
            weights_alone,
        ]


def gradients_kept(rank: int, world_size: int, folder: Path) -> int:
    """Bytes of the gradients that Adam has read, after an update whose own are in bfloat16."""
    from tests.megatron.moments import adams, role_in, update

    role = role_in(Layout(), folder, "bfloat16", megatron={"grad_reduce_in_fp32": False})
    update(role, rank)
    parameters = [p for adam in adams(role) for group in adam.optimizer.param_groups for p in group["params"]]
    assert parameters
    return sum(p.grad.nbytes for p in parameters if p.grad is not None)


def test_an_update_leaves_no_copies_of_gradients(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    assert world.call(gradients_kept, tmp_path / "model", size=1) == [0]


def rounded(nbytes: int) -> int:
    """What torch pins for a block of `nbytes`."""
    return 1 << (nbytes - 1).bit_length()


def test_storages_are_packed_into_blocks_that_pinning_does_not_round(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.megatron import host_memory
    from megarl.megatron import offload as module

    pinned: list[int] = []

    def recorded(nbytes: int, device_type: str) -> torch.Tensor:
        pinned.append(rounded(nbytes))
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "allocate", recorded)
    monkeypatch.setattr(module, "unwrap_model", lambda chunk: chunk)
    monkeypatch.setattr(host_memory, "LARGEST_BLOCK", 1024)
    monkeypatch.setattr(host_memory, "SMALLEST_BLOCK", 64)
    layer, generator = torch.nn.Module(), torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in (300, 1, 700, 5, 513, 80)]
    for number, value in enumerate(values):
        layer.register_parameter(f"p{number}", torch.nn.Parameter(value.clone()))
    offload, moved = (
        module.Offload(plain_role(layer), device_type="cpu"),
        4 * 1599,
    )
    offload.keep(weights=False, rest=True)
    assert bytes_held(offload) == {"weights": 0, "rest": 0}
    assert pinned == [1024] * 6 + [256]
    assert moved <= sum(pinned) < moved + 64
    offload.keep(weights=True, rest=True)
    for parameter, value in zip(layer.parameters(), values, strict=True):
        assert torch.equal(parameter, value)


def test_an_8b_model_pins_less_than_a_thousandth_more_than_it_moves() -> None:
    from megarl.megatron.host_memory import block_sizes

    shape = ModelShape.read("examples/models/llama-3.1-8b")
    rules = shape.weight_map.rules
    sizes = [math.prod(BoundRule(rule.megatron_name, rule.hf_names, rule.packing).shape(1, shape.vocab)) for rule in rules]
    storages = [2 * size for rule, size in zip(rules, sizes, strict=True) for _ in range(32 if rule.stage == "layer" else 1)]
    moved = sum(storages)
    assert moved == 2 * 8_030_261_248
    assert sum(map(rounded, storages)) > 1.13 * moved  # a block for each, as frozen roles and master weights are
    blocks = block_sizes(moved)
    assert all(size == rounded(size) for size in blocks)
    assert moved <= sum(blocks) < moved + 2**20
    assert sum(blocks) < 1.001 * moved
    assert block_sizes(0) == []


class Fp8Weight(torch.nn.Parameter):
    """As Transformer Engine's: its values are in two tensors of its own, and its own storage is empty."""

    def __new__(cls, rows: torch.Tensor, columns: torch.Tensor | None) -> Fp8Weight:
        weight = super().__new__(cls, torch.empty(0), requires_grad=False)
        weight.parts = (rows, columns)
        return weight

    def get_data_tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.parts


def test_weights_in_fp8_leave_with_both_of_their_copies_and_cached_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.megatron import offload as module

    monkeypatch.setattr(module, "is_float8tensor", lambda tensor: isinstance(tensor, Fp8Weight))
    monkeypatch.setattr(module, "unwrap_model", lambda chunk: chunk)
    layer = torch.nn.Module()
    both = Fp8Weight(torch.arange(6, dtype=torch.uint8), torch.arange(6, 12, dtype=torch.uint8))
    layer.both, layer.rows = both, Fp8Weight(torch.arange(4, dtype=torch.uint8), None)
    layer.plain = torch.nn.Parameter(torch.arange(3.0))
    layer._fp8_workspaces = {"weight": torch.zeros(99)}  # type: ignore[assignment]
    cached = layer._fp8_workspaces
    offload = module.Offload(plain_role(layer), device_type="cpu")
    assert bytes_held(offload) == {"weights": 6 + 6 + 4 + 12, "rest": 0}
    offload.keep(weights=True, rest=False)
    assert cached == {}
    offload.keep(weights=False, rest=False)
    assert all(part.untyped_storage().nbytes() == 0 for part in both.parts)
    assert layer.plain.untyped_storage().nbytes() == 0
    offload.keep(weights=True, rest=True)
    assert [part.tolist() for part in both.parts] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert layer.plain.tolist() == [0.0, 1.0, 2.0]
