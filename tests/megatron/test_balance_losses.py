"""Balance losses and bias updates against their dense formulas in float64 over the whole batch, in every layout and packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.observe.expert_load import EXPERTS
from tests.families import build_folder, hub_gradients, hub_tensors, hugging_face
from tests.megatron.routing_reference import RecordedRouters, Routed, dense_policy_loss, policy_loss
from tests.megatron.saving import load_role, save_role
from tests.themes.parallel.worlds import MODES, gradients, micro_batches, units
from tests.world import World

SP = {"tp": 2, "sequence_parallel": True}
COEFFICIENTS = {"balance_coef": 0.3, "sequence_balance_coef": 0.2, "z_loss_coef": 0.05}
TOLERANCE = 1e-5
"""Relative to the largest element of a gradient, as of tests/themes/parallel."""


def make_role(folder: Path, layout: Layout, recompute: str, coefficients: dict[str, float], lr: float = 1e-3) -> Any:
    from megarl.megatron.options import ExpertBalance, ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    options = ModelOptions(
        str(folder), layout, recompute=recompute, logit_chunk_tokens=5, experts=ExpertBalance(**coefficients)
    )
    return RankModel(options, OptimizerOptions(lr=lr))


def balanced_gradients(
    rank: int, world_size: int, folder: Path, layout: Layout, modes: tuple[str, ...], coefficients: dict[str, float]
) -> dict[str, Any]:
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.pass_parts import PassParts
    from megarl.megatron.step import forward_backward

    initialize_layout(layout, seed=1)
    found: dict[str, Any] = {}
    for name in modes:
        mode = MODES[name]
        role = make_role(folder, layout, mode.recompute, coefficients)
        mine = micro_batches(mode, layout.dp, units())[layout.coords(rank).dp]
        for chunk in role.chunks:
            chunk.train()
        for _ in range(2):  # what the first pass kept must not be in the second
            forward_backward(role.chunks, role.options, mine, policy_loss, parts=PassParts(watch=role.watch))
        found[name] = {"layers": role.watch.take(), "gradients": gradients(role)}
    return found


def dense_losses(layer: list[Routed]) -> dict[str, Tensor]:
    """The three losses of one layer, whose entries are the sequences of the batch."""
    scores, chosen = torch.cat([one.scores for one in layer]), torch.cat([one.chosen for one in layer])
    tokens, experts, top_k = len(scores), scores.shape[1], int(chosen[0].sum())
    balance = experts * (chosen.sum(0) / (top_k * tokens) * scores.mean(0)).sum()
    of_sequences = []
    for one in layer:
        picked = torch.zeros_like(one.scores).scatter_(1, one.scores.topk(top_k, dim=1).indices, 1.0)
        length = len(one.scores)
        shares = experts / (top_k * length) * picked.sum(0)
        of_sequences.append((shares * one.scores.sum(0) / length).sum())
    z_loss = torch.cat([one.logits for one in layer]).exp().sum(1).log().square().mean()
    return {"balance_coef": balance, "sequence_balance_coef": torch.stack(of_sequences).mean(), "z_loss_coef": z_loss}


def by_formulas(family: str, coefficients: dict[str, float]) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Gradients by hub name, of the policy loss and the balance losses over all sequences, and these losses by layer."""
    model = hugging_face(family).double()
    recorded = RecordedRouters(model, family)
    loss = dense_policy_loss(model, units())
    losses = {number: dense_losses(layer) for number, layer in recorded.layers.items()}
    for of_layer in losses.values():
        loss = loss + sum(coefficient * of_layer[name] for name, coefficient in coefficients.items())
    loss.backward()
    return hub_gradients(model), losses


@pytest.mark.parametrize(
    ("family", "layout", "modes", "names"),
    [
        ("mixtral", Layout(), ("packed", "unpacked", "packed, full recomputation"), (*COEFFICIENTS,)),
        ("mixtral", Layout(dp=2, cp=2), ("packed", "unpacked, full recomputation"), (*COEFFICIENTS,)),
        ("deepseek_v3", Layout(**SP, dp=2, ep=2), ("packed", "packed, full recomputation"), (*COEFFICIENTS,)),
        ("qwen3_moe", Layout(**SP, pp=2, etp=2), ("packed, full recomputation",), ("sequence_balance_coef",)),
        ("mixtral", Layout(pp=2, vpp=2), ("unpacked", "packed, full recomputation"), ("balance_coef", "z_loss_coef")),
    ],
)
def test_balance_losses_have_the_gradients_of_their_dense_formulas(
    world: World, tmp_path: Path, family: str, layout: Layout, modes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    build_folder(family, tmp_path / family)
    coefficients = {name: COEFFICIENTS[name] for name in names}
    expected, losses = by_formulas(family, coefficients)
    without, _ = by_formulas(family, {})
    arguments = (tmp_path / family, layout, modes, coefficients)
    answers = world.call(balanced_gradients, *arguments, size=layout.world_size, timeout_s=300)
    for mode in modes:
        found = {name: tensor for answer in answers for name, tensor in answer[mode]["gradients"].items()}
        assert not expected.keys() - found.keys()
        moved = 0
        for name, wanted in expected.items():
            scale = wanted.abs().max().clamp_min(1e-30)
            assert ((found[name].double() - wanted) / scale).abs().max() < TOLERANCE, (mode, name)
            moved += bool(((without[name] - wanted) / scale).abs().max() > 100 * TOLERANCE)
        assert moved > len(expected) // 4  # routers, and all before them
        layers = {number: row for answer in answers for number, row in answer[mode]["layers"].items()}
        for number, row in layers.items():
            assert row.balance_loss == pytest.approx(float(losses[number]["balance_coef"]), rel=1e-5)
            if "sequence_balance_coef" in names:
                assert row.sequence_balance == pytest.approx(float(losses[number]["sequence_balance_coef"]), rel=1e-5)
            if "z_loss_coef" in names:
                assert row.z_loss / row.tokens == pytest.approx(float(losses[number]["z_loss_coef"]), rel=1e-5)


RATE = 0.25
"""Of a bias update: exact in float32."""


def moved_biases(rank: int, world_size: int, folder: Path, layout: Layout, rate: float, checkpoint: str) -> dict[str, Any]:
    """Biases by hub name after an update, after its checkpoint was loaded into another role, and what the update routed.

    An update whose loss is no number comes first.
    """
    from megarl.megatron.build import initialize_layout

    initialize_layout(layout, seed=1)
    role = make_role(folder, layout, "none", {"bias_update_rate": rate}, lr=0.0)
    mine = micro_batches(MODES["packed"], layout.dp, units())[layout.coords(rank).dp]
    before = [router.expert_bias.tolist() for router in role.watch.routers]
    role.update(mine, lambda output, stream: (output.sum() * torch.nan, {}))
    assert [router.expert_bias.tolist() for router in role.watch.routers] == before
    loads = role.update(mine, policy_loss).get(EXPERTS, {})
    moved = {name: tensor.clone() for name, tensor in role.export()}
    save_role(role, checkpoint)
    again = make_role(folder, layout, "none", {"bias_update_rate": rate}, lr=0.0)
    load_role(again, checkpoint)
    replicas = [router.expert_bias.tolist() for router in role.watch.routers]
    return {"moved": moved, "loaded": dict(again.export()), "loads": loads, "replicas": replicas}


@pytest.mark.parametrize("rate", [RATE, 0.0])
def test_biases_move_against_the_load_of_the_whole_batch_and_only_if_asked(world: World, tmp_path: Path, rate: float) -> None:
    family, layout = "deepseek_v3", Layout(**SP, dp=2, ep=2)
    build_folder(family, tmp_path / family)
    answers = world.call(moved_biases, tmp_path / family, layout, rate, str(tmp_path / "saved"), size=4)
    before = hub_tensors(hugging_face(family))
    moved, loaded = ({name: t for answer in answers for name, t in answer[what].items()} for what in ("moved", "loaded"))
    routed = {number: row for answer in answers for number, row in answer["loads"].items()}
    assert sorted(routed) == [1, 2, 3]
    for name, tensor in before.items():
        wanted = tensor
        if name.endswith("e_score_correction_bias"):
            row = routed[int(name.split(".")[2])]
            assert row.bias_spread == pytest.approx(float(tensor.max() - tensor.min()))
            of_layer = torch.tensor(row.loads)
            wanted = tensor + rate * (of_layer.mean() - of_layer).sign()
            assert bool((wanted != tensor).all()) is bool(rate)
        assert torch.equal(moved[name], wanted), name
        assert torch.equal(loaded[name], moved[name]), name
    assert all(answer["replicas"] == answers[0]["replicas"] for answer in answers)
