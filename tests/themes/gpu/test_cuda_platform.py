"""The CUDA platform computes what the CPU platform does, and offloads the optimizer as megatron-core says it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.moments import assert_equal
from tests.megatron.saving import load_role, save_role
from tests.themes.gpu.models import gradients_of, hugging_face, log_probs_of, objective, optimizer_state, role_for, units
from tests.world import World

Folders = Callable[[str], Path]


def on_cpu(rank: int, world_size: int, folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout

    assert not torch.cuda.is_available()
    initialize_layout(Layout(), seed=1)
    role = role_for(folder)
    return log_probs_of(role), gradients_of(role)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_reference_layers_compute_the_same_as_on_a_cpu(
    rank: None, folder_of: Folders, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(1, threads=8) as world, monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        log_probs, gradients = world.call(on_cpu, folder_of(family))[0]
    assert not torch.backends.cuda.matmul.allow_tf32
    role = role_for(folder_of(family))
    torch.testing.assert_close(log_probs_of(role), log_probs, rtol=1e-5, atol=2e-5)
    for name, found in gradients_of(role).items():
        error = (found - gradients[name]).norm() / gradients[name].norm()
        assert error <= 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_offloaded_updates_are_those_on_the_device(
    transformer_engine: Any, folder_of: Folders, fraction: float, tmp_path: Path
) -> None:
    found = {}
    for share in (0.0, fraction):
        options = {"layer_spec": "transformer_engine", "dtype": "bfloat16"}
        role = role_for(folder_of("llama"), adam={"offload_fraction": share}, **options)
        for _ in range(3):
            role.update([units()], objective)
        found[share] = optimizer_state(role)
        if share:
            state = getattr(role.optimizer, "chained_optimizers", [role.optimizer])[0].optimizer.state
            on_host = sum(s["exp_avg"].numel() for s in state.values() if s["exp_avg"].device.type == "cpu")
            assert on_host / sum(s["exp_avg"].numel() for s in state.values()) == pytest.approx(fraction, abs=0.2)
            save_role(role, str(tmp_path / "checkpoint"))
            plain = role_for(folder_of("llama"), **options)
            load_role(plain, str(tmp_path / "checkpoint"))
            assert_equal(optimizer_state(plain), found[share])
    before = dict(hugging_face("llama").named_parameters())
    moved = {
        share: torch.cat([(state[f"param {name}"] - weight.detach()).flatten() for name, weight in before.items()])
        for share, state in found.items()
    }
    # Three steps: from the second on gradients differ as weights that lie between two of BF16's round either way.
    assert (moved[fraction] - moved[0.0]).norm() <= 0.01 * moved[0.0].norm()


def test_the_optimizer_is_the_one_that_doctor_names(rank: None) -> None:
    from megarl.launch.doctor import _TRAINER_PROBE, probe
    from megarl.megatron.optimizer import describe_optimizer
    from megarl.megatron.options import OptimizerOptions, has_transformer_engine

    described = describe_optimizer(OptimizerOptions(lr=1.0))
    assert probe(_TRAINER_PROBE)["optimizer"] == described
    assert described.startswith("transformer_engine") or not has_transformer_engine()
