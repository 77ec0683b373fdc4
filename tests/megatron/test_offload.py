"""A role that gives up its memory and takes it back goes on as if nothing had been; in between it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from tests.families import build_folder
from tests.world import World


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
