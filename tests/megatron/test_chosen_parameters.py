"""Frozen parameters keep their bytes and have no state, groups have rates of their own: as torch's AdamW has it in float64."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.megatron.options import ParameterGroup
from tests.families import build_folder, hub_gradients, hub_tensors, hugging_face
from tests.megatron.moments import adams, assert_equal, everything, merged
from tests.megatron.routing_reference import dense_policy_loss, policy_loss
from tests.megatron.saving import load_role, save_role
from tests.themes.parallel.worlds import MODES, micro_batches, units
from tests.world import World

LR, DECAY, BETAS, EPS, CLIP, UPDATES = 1e-2, 0.1, (0.9, 0.95), 1e-3, 1.0, 2
Groups = tuple[ParameterGroup, ...]


def train(
    rank: int,
    world_size: int,
    folder: Path,
    layout: Layout,
    recompute: str,
    freeze: tuple[str, ...],
    groups: Groups,
    saved: str,
) -> dict[str, Any]:
    """Two updates, and the second of them again from a checkpoint; also what of the model has a state or a gradient."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.global_names import global_tensors
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=1)

    def role_of(folder: Path) -> Any:
        options = ModelOptions(str(folder), layout, recompute=recompute, logit_chunk_tokens=5, freeze=freeze)
        adam = OptimizerOptions(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, clip_grad=CLIP, groups=groups)
        return RankModel(options, adam)

    def update(role: Any) -> dict[str, Any]:
        return role.update(micro_batches(MODES["packed"], layout.dp, units())[layout.coords(rank).dp], policy_loss)

    role = role_of(folder)
    for number in range(UPDATES):
        metrics = update(role)
        if number == 0:
            save_role(role, saved)
    resumed = role_of(folder)
    load_role(resumed, saved)
    update(resumed)
    rules = [(role.weight_map.rule_for(name), tensor) for name, tensor in global_tensors(role.chunks)]
    trained = {name for rule, tensor in rules if hasattr(tensor, "main_grad") for name in rule.hf_names}
    owned = [adam.model_param_group_index_map for adam in adams(role)]
    stateful = {name for rule, tensor in rules if any(tensor in of_adam for of_adam in owned) for name in rule.hf_names}
    return {
        "tensors": everything(role),
        "resumed": everything(resumed),
        "trained": trained,
        "stateful": stateful,
        "metrics": {name: value for name, value in metrics.items() if name in ("lr", "grad_norm")},
    }


def of_group(name: str, groups: Groups) -> ParameterGroup:
    own = (group for group in groups if any(fnmatchcase(name, pattern) for pattern in group.match))
    return next(own, ParameterGroup(()))


def by_torch(family: str, frozen: set[str], groups: Groups) -> tuple[dict[str, Tensor], float]:
    """Hub tensors after the updates, and the norm of the last gradient, by torch's AdamW in float64 on the whole model."""
    model = hugging_face(family).double()
    # transformers holds all experts of a layer in one parameter: here each expert has a leaf of its own
    places = hub_tensors(model)
    names, settings = {}, []
    for name, tensor in places.items():
        if name in frozen or name.endswith("e_score_correction_bias"):
            continue
        leaf = torch.nn.Parameter(tensor.detach().clone())
        names[name] = leaf
        group = of_group(name, groups)
        decay = 0.0 if tensor.dim() == 1 else DECAY if group.weight_decay is None else group.weight_decay
        settings.append({"params": [leaf], "lr": LR * group.lr_factor, "weight_decay": decay})
    adam = torch.optim.AdamW(settings, betas=BETAS, eps=EPS)
    norm = 0.0
    for _ in range(UPDATES):
        model.zero_grad()
        dense_policy_loss(model, units()).backward()
        gradients = hub_gradients(model)
        for name, leaf in names.items():
            leaf.grad = gradients[name].clone()
        norm = float(torch.nn.utils.clip_grad_norm_(names.values(), CLIP))
        adam.step()
        with torch.no_grad():
            for name, leaf in names.items():
                places[name].copy_(leaf)
    return places, norm


EMBEDDING, FIRST_LAYERS = "model.embed_tokens.*", ("model.layers.[01].*",)
ALL_BUT_MLP = ("*self_attn*", "*norm*", "lm_head.*", EMBEDDING)
OWN_RATES = (ParameterGroup(("model.layers.3.*",), 0.5, 0.0), ParameterGroup(("*.experts.*", "model.norm.weight"), 2.0))
SP = {"tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("family", "layout", "recompute", "freeze", "groups"),
    [
        pytest.param("llama", Layout(pp=2), "full", (EMBEDDING, *FIRST_LAYERS), (), id="a-whole-stage"),
        pytest.param("llama", Layout(pp=2, vpp=2, dp=2), "none", FIRST_LAYERS, (), id="two-chunks"),
        pytest.param("qwen2", Layout(pp=2), "none", (EMBEDDING,), (), id="tied-embeddings"),
        pytest.param("llama", Layout(tp=2), "full", ALL_BUT_MLP, (), id="all-but-mlp-recomputed"),
        pytest.param("mixtral", Layout(**SP, dp=2, ep=2), "none", ("router", "*.experts.1.*"), OWN_RATES, id="experts"),
        pytest.param("deepseek_v3", Layout(**SP, cp=2, etp=2), "none", ("router",), OWN_RATES, id="routers"),
    ],
)
def test_what_is_chosen_is_updated_as_torch_does(
    world: World, tmp_path: Path, family: str, layout: Layout, recompute: str, freeze: tuple[str, ...], groups: Groups
) -> None:
    build_folder(family, tmp_path / family)
    before = hub_tensors(hugging_face(family))
    arguments = (tmp_path / family, layout, recompute, freeze, groups, str(tmp_path / "saved"))
    answers = world.call(train, *arguments, size=layout.world_size, timeout_s=300)
    found = merged(answers, "tensors")
    assert_equal(merged(answers, "resumed"), found)

    patterns = [pattern for pattern in freeze if pattern != "router"]
    gates = {name for name in before if ".gate." in name} if "router" in freeze else set()
    frozen = {name for name in before if any(fnmatchcase(name, pattern) for pattern in patterns)} | gates
    trained = set().union(*(answer["trained"] for answer in answers))
    assert trained == {name for name in before if name not in frozen and not name.endswith("e_score_correction_bias")}
    assert set().union(*(answer["stateful"] for answer in answers)) == trained
    assert 0 < len(frozen) < len(before)

    expected, norm = by_torch(family, frozen, groups)
    metrics = answers[0]["metrics"]
    assert metrics["lr"] == LR
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, tensor in before.items():
        weight = found[f"weight {name}"]
        if name in frozen or name.endswith("e_score_correction_bias"):
            assert torch.equal(weight, tensor), name
        else:
            moved = (expected[name] - tensor).abs().max()
            assert ((weight - expected[name]).abs().max() / moved) < 1e-4, name


def unfrozen(rank: int, world_size: int, folder: Path, freeze: tuple[str, ...], saved: str) -> str:
    """What a role that trains everything says of a checkpoint of one that was trained with `freeze`."""
    from megarl.errors import CheckpointError
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    role = RankModel(ModelOptions(str(folder), Layout(), freeze=freeze), OptimizerOptions(lr=LR))
    role.update(micro_batches(MODES["packed"], 1, units())[0], policy_loss)
    save_role(role, saved)
    try:
        load_role(RankModel(ModelOptions(str(folder), Layout()), OptimizerOptions(lr=LR)), saved)
    except CheckpointError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("freeze", [(EMBEDDING,), ("model.layers.2.*",), ("*.experts.1.*",), ("router",)])
def test_what_was_frozen_must_stay_frozen(world: World, tmp_path: Path, freeze: tuple[str, ...]) -> None:
    build_folder("mixtral", tmp_path / "model")
    [said] = world.call(unfrozen, tmp_path / "model", freeze, str(tmp_path / "saved"), size=1)
    assert "what is trained was frozen when it was written; freeze it again, or begin a new run" in said


def frozen_later(rank: int, world_size: int, folder: Path, freeze: tuple[str, ...], saved: str) -> dict[str, float]:
    """By name the largest step of a weight in an update behind a checkpoint of a role that trained everything."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    role = RankModel(ModelOptions(str(folder), Layout()), OptimizerOptions(lr=LR))
    role.update(micro_batches(MODES["packed"], 1, units())[0], policy_loss)
    save_role(role, saved)
    trained = {name: tensor.clone() for name, tensor in role.export()}
    later = RankModel(ModelOptions(str(folder), Layout(), freeze=freeze), OptimizerOptions(lr=LR))
    load_role(later, saved)
    later.update(micro_batches(MODES["packed"], 1, units())[0], policy_loss)
    return {name: float((tensor - trained[name]).abs().max()) for name, tensor in later.export()}


def test_more_may_be_frozen_behind_a_checkpoint(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    [moved] = world.call(frozen_later, tmp_path / "model", ("model.layers.1.*",), str(tmp_path / "saved"), size=1)
    frozen = {name for name in moved if name.startswith("model.layers.1.")}
    assert frozen
    assert {name for name, step in moved.items() if step == 0} == frozen


def rates(rank: int, world_size: int, folder: Path) -> list[tuple[float, set[float]]]:
    """Of each update the rate that is shown, and those that its parameters had."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    schedule: dict[str, Any] = {"min_lr": LR / 10, "schedule": "linear", "warmup_steps": 2, "total_steps": 5}
    adam = OptimizerOptions(lr=LR, groups=(ParameterGroup(("*.layers.1.*",), 0.25),), **schedule)
    role = RankModel(ModelOptions(str(folder), Layout()), adam)
    found = []
    for _ in range(6):
        shown = role.update(micro_batches(MODES["packed"], 1, units())[0], policy_loss)["lr"]
        found.append((shown, {group["lr"] for part in adams(role) for group in part.optimizer.param_groups}))
    return found


def test_a_group_s_rate_is_its_share_of_the_schedule_to_the_end(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    [found] = world.call(rates, tmp_path / "model", size=1)
    assert [shown for shown, _ in found] == pytest.approx([rate * LR for rate in (0.5, 1, 0.775, 0.55, 0.325, 0.1)])
    for shown, used in found:
        assert sorted(used) == pytest.approx([0.25 * shown, shown])
