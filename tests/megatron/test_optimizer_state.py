"""Offloaded optimizer state: megatron-core's HybridDeviceOptimizer updates as the plain one does, checkpoints are the same.

Here main memory plays both parts: while the optimizer is built, every tensor says that it is on a GPU until `.cpu()` brings it
to the other side. From there on the code that runs is megatron-core's own; tests/themes/gpu has it on a real GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from tests.families import build_folder
from tests.megatron.moments import adams, assert_equal, everything, merged, role_in, update
from tests.megatron.saving import load_role, save_role
from tests.world import World

UPDATES = 3
DP2, TP2 = Layout(dp=2), Layout(tp=2)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Tensors are on a GPU, except what `.cpu()` returned and what was made from that."""
    from megatron.core.optimizer import optimizer_config

    from megarl import platform
    from megarl.megatron import optimizer
    from megarl.platform.cpu_redirects import CpuEvent

    def following(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def follow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = original(tensor, *args, **kwargs)
            result.is_on_host = getattr(tensor, "is_on_host", False)
            return result

        return follow

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        result.is_on_host = True  # type: ignore[attr-defined]
        return result

    CpuEvent.wait = lambda event, stream: None  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "cuda_present", lambda: True)
        patch.setattr(optimizer, "has_transformer_engine", lambda: True)
        patch.setattr(optimizer_config, "is_te_min_version", lambda version: False)
        for name in ("detach", "clone", "float"):
            patch.setattr(torch.Tensor, name, following(name))
        patch.setattr(torch.Tensor, "cpu", to_host)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: not getattr(tensor, "is_on_host", False)))
        yield


def offloading_role(layout: Layout, folder: Path, dtype: str, fraction: float) -> Any:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    with pretended_gpu():
        role = role_in(layout, folder, dtype, fraction)
    for adam in adams(role):
        assert isinstance(adam.optimizer, HybridDeviceOptimizer)
    return role


def train(
    rank: int, world_size: int, layout: Layout, folder: Path, dtype: str, fraction: float, saved: str | None, loaded: str | None
) -> dict[str, Any]:
    """Updates from the start or from the checkpoint `loaded`, and perhaps saves; how many elements the host updates, too."""

    role = offloading_role(layout, folder, dtype, fraction) if fraction else role_in(layout, folder, dtype)
    if loaded is not None:
        load_role(role, loaded)
    at_start = everything(role) if loaded is not None else {}
    for _ in range(UPDATES):
        update(role, rank)
    if saved is not None:
        save_role(role, saved)
    on_host = [sum(copy.numel() for copy in adam.optimizer.cpu_copys_map_gpu_param) if fraction else 0 for adam in adams(role)]
    total = [sum(p.numel() for group in adam.optimizer.param_groups for p in group["params"]) for adam in adams(role)]
    return {"at_start": at_start, "tensors": everything(role), "share": sum(on_host) / sum(total)}


@pytest.mark.parametrize(
    ("family", "dtype", "fraction"),
    # the second has both kinds of parameters in both places
    [pytest.param("llama", "float32", 1.0, marks=pytest.mark.exhaustive), ("mixtral", "bfloat16", 0.5)],
)
def test_offloaded_updates_and_checkpoints_are_those_of_the_plain_optimizer(
    world: World, tmp_path: Path, family: str, dtype: str, fraction: float
) -> None:
    folder, plain_path, offloaded_path = tmp_path / "model", str(tmp_path / "plain"), str(tmp_path / "offloaded")
    build_folder(family, folder)
    source, target = (DP2, TP2) if family == "llama" else (Layout(dp=2, ep=2), Layout(pp=2))
    plain = world.call(train, source, folder, dtype, 0.0, plain_path, None, size=2)
    offloaded = world.call(train, source, folder, dtype, fraction, offloaded_path, None, size=2)
    for answer in offloaded:
        assert answer["share"] == pytest.approx(fraction, abs=0.2)
        assert answer["share"] == 1.0 or fraction < 1
    expected = merged(plain, "tensors")
    for name, tensor in merged(offloaded, "tensors").items():
        if dtype == "float32" or not name.startswith("weight"):
            torch.testing.assert_close(
                tensor, expected[name], rtol=2e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )

    # each checkpoint into the other kind of optimizer, under another layout
    into_plain = world.call(train, target, folder, dtype, 0.0, None, offloaded_path, size=2)
    assert_equal(merged(into_plain, "at_start"), merged(offloaded, "tensors"))
    into_offloaded = world.call(train, target, folder, dtype, fraction, None, plain_path, size=2)
    assert_equal(merged(into_offloaded, "at_start"), merged(plain, "tensors"))
    torch.testing.assert_close(merged(into_offloaded, "tensors"), merged(into_plain, "tensors"), rtol=2e-2, atol=2e-3)


def test_where_there_is_no_gpu_all_state_is_in_main_memory_anyway(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    assert world.call(kind_of_optimizer, tmp_path / "model", size=1) == [("AdamW", "torch.optim.adamw.AdamW")]


def kind_of_optimizer(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    from megarl.megatron.optimizer import describe_optimizer
    from megarl.megatron.options import OptimizerOptions

    role = role_in(Layout(), folder, "float32", 0.5)
    return type(adams(role)[0].optimizer).__name__, describe_optimizer(OptimizerOptions(lr=1.0, offload_fraction=0.5))
