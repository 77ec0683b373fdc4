"""Muon updates every Hugging Face matrix as Newton-Schulz in float64 does on the whole of it, in every layout, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.megatron.options import ParameterGroup
from tests.families import build_folder, hub_gradients, hub_tensors, hugging_face
from tests.megatron.moments import adams, assert_equal, merged
from tests.megatron.routing_reference import dense_policy_loss, policy_loss
from tests.megatron.saving import load_role, save_role
from tests.themes.parallel.worlds import MODES, micro_batches, units
from tests.world import World

LR, DECAY, MOMENTUM, STEPS, UPDATES = 1e-2, 0.1, 0.9, 5, 2
BETAS, EPS = (0.9, 0.95), 1e-2
HALF = ParameterGroup(("model.layers.2.*",), 0.5)


def make_role(folder: Path, layout: Layout, name: str = "muon") -> Any:
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    settings: dict[str, Any] = {"momentum": MOMENTUM, "newton_schulz_steps": STEPS, "groups": (HALF,), "clip_grad": 0.0}
    optimizer = OptimizerOptions(lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS, name=name, **settings)
    return RankModel(ModelOptions(str(folder), layout, logit_chunk_tokens=5), optimizer)


def train(rank: int, world_size: int, folder: Path, layout: Layout, saved: str) -> dict[str, Any]:
    from megarl.megatron.build import initialize_layout

    initialize_layout(layout, seed=1)

    def update(role: Any) -> None:
        role.update(micro_batches(MODES["packed"], layout.dp, units())[layout.coords(rank).dp], policy_loss)

    role = make_role(folder, layout)
    for number in range(UPDATES):
        update(role)
        if number == 0:
            save_role(role, saved)
    resumed = make_role(folder, layout)
    load_role(resumed, saved)
    update(resumed)
    seconds = sum("exp_avg_sq" in state for adam in adams(role) for state in adam.optimizer.state.values())
    states = sum(len(adam.optimizer.state) for adam in adams(role))
    weights = [{name: tensor.clone() for name, tensor in one.export()} for one in (role, resumed)]
    refused = ""
    try:
        load_role(make_role(folder, layout, "adamw"), saved)
    except Exception as error:
        refused = str(error)
    return {"weights": weights[0], "resumed": weights[1], "seconds": (seconds, states), "refused": refused}


def newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / matrix.norm()
    for _ in range(STEPS):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def is_muons(name: str, tensor: Tensor) -> bool:
    return ".layers." in name and tensor.dim() == 2


def dense(family: str) -> dict[str, Tensor]:
    """Hub tensors after the updates, in float64."""
    model = hugging_face(family).double()
    places = hub_tensors(model)
    trained = {name: tensor for name, tensor in places.items() if not name.endswith("e_score_correction_bias")}
    rates = {name: LR * (0.5 if name.startswith("model.layers.2.") else 1.0) for name in trained}
    leaves = {name: torch.nn.Parameter(t.clone()) for name, t in trained.items() if not is_muons(name, t)}
    settings = [
        {"params": [leaf], "lr": rates[name], "weight_decay": DECAY if leaf.dim() > 1 else 0.0} for name, leaf in leaves.items()
    ]
    adam = torch.optim.AdamW(settings, betas=BETAS, eps=EPS)
    sums = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    for _ in range(UPDATES):
        model.zero_grad()
        dense_policy_loss(model, units()).backward()
        gradients = hub_gradients(model)
        with torch.no_grad():
            for name, tensor in trained.items():
                if name in leaves:
                    leaves[name].grad = gradients[name].clone()
                    continue
                sums[name] = MOMENTUM * sums[name] + gradients[name]
                update = newton_schulz(gradients[name] + MOMENTUM * sums[name])
                tensor.mul_(1 - rates[name] * DECAY).sub_(rates[name] * 0.2 * max(tensor.shape) ** 0.5 * update)
            adam.step()
            for name, leaf in leaves.items():
                trained[name].copy_(leaf)
    return places


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("llama", Layout(), id="llama-alone"),
        pytest.param("qwen2", Layout(tp=2, dp=2), id="qwen2-tp2·dp2"),
        pytest.param("llama", Layout(pp=2, cp=2), id="llama-pp2·cp2"),
        pytest.param("mixtral", Layout(tp=2, dp=2, ep=2, sequence_parallel=True), id="mixtral-ep2·tp2+sp"),
        pytest.param("deepseek_v3", Layout(tp=2, etp=2, dp=2, sequence_parallel=True), id="deepseek-etp2·dp2"),
    ],
)
def test_muon_is_dense_newton_schulz_in_every_layout(world: World, tmp_path: Path, family: str, layout: Layout) -> None:
    build_folder(family, tmp_path / family)
    before, expected = hub_tensors(hugging_face(family)), dense(family)
    answers = world.call(train, tmp_path / family, layout, str(tmp_path / "saved"), size=layout.world_size, timeout_s=400)
    found = merged(answers, "weights")
    assert_equal(merged(answers, "resumed"), found)
    worst = {}
    for name, tensor in before.items():
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(found[name], tensor)
            continue
        moved = (expected[name] - tensor).abs().max()
        worst[name] = float((found[name] - expected[name]).abs().max() / moved)
    assert max(worst.values()) < 1e-4, sorted(worst.items(), key=lambda item: -item[1])[:5]
    for answer in answers:
        seconds, states = answer["seconds"]
        assert seconds < states  # matrices have one moment
        assert "has the moments of 'muon', and optimizer.name is 'adamw'; it must be 'muon'" in answer["refused"]


def test_singular_values_come_near_one_whatever_the_shape() -> None:
    from megarl.megatron.muon import orthogonalised

    for shape in ((6, 9), (9, 6), (5, 5)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        torch.testing.assert_close(orthogonalised(matrix, STEPS), newton_schulz(matrix), rtol=1e-9, atol=1e-9)
        values = torch.linalg.svdvals(orthogonalised(matrix, STEPS))
        assert 0.3 < values.min() < values.max() < 1.3
