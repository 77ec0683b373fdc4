"""Loads and entropies of experts are those of transformers' routers over the whole batch, in every layout and packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.observe.expert_load import EXPERTS, LayerRouting
from tests.families import build_folder, hugging_face
from tests.megatron.routing_reference import RecordedRouters, sequences
from tests.themes.parallel.worlds import MODES, micro_batches, objective, units
from tests.world import World

SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = {
    "alone": Layout(),
    "dp2·cp2": Layout(dp=2, cp=2),
    "ep2·tp2+sp": Layout(**SP, dp=2, ep=2),
    "tp2+sp·pp2": Layout(**SP, pp=2, etp=2),
    "vpp2": Layout(pp=2, vpp=2),
}


def routed(
    rank: int, world_size: int, folder: Path, layout: Layout, mode: str, gathers: bool = False
) -> dict[int, LayerRouting]:
    """`gathers`: an optimizer step is one pass for each micro-batch."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.gathered_updates import apply_gathered, gather
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=1)
    role = RankModel(
        ModelOptions(str(folder), layout, recompute=MODES[mode].recompute, logit_chunk_tokens=5), OptimizerOptions(lr=0.0)
    )
    mine = micro_batches(MODES[mode], layout.dp, units())[layout.coords(rank).dp]
    role.update(mine, objective)
    role.forward(mine)  # what only answers is not counted
    if gathers:
        for micro_batch in mine:
            gather(role, [micro_batch], objective)
        return apply_gathered(role).get(EXPERTS, {})
    return role.update(mine, objective).get(EXPERTS, {})


@pytest.mark.parametrize(
    ("family", "layout", "mode"),
    [
        ("mixtral", "alone", "packed"),
        ("mixtral", "alone", "unpacked, gathered"),
        ("mixtral", "dp2·cp2", "packed, full recomputation"),
        ("mixtral", "ep2·tp2+sp", "unpacked"),
        ("deepseek_v3", "tp2+sp·pp2", "packed"),
        ("qwen3_moe", "vpp2", "packed, full recomputation"),
    ],
)
def test_loads_and_entropies_are_those_of_transformers(
    world: World, tmp_path: Path, family: str, layout: str, mode: str
) -> None:
    build_folder(family, tmp_path / family)
    of_ranks = LAYOUTS[layout]
    plain, gathers = mode.removesuffix(", gathered"), mode.endswith(", gathered")
    answers = world.call(routed, tmp_path / family, of_ranks, plain, gathers, size=of_ranks.world_size)
    found: dict[int, LayerRouting] = {}
    for answer in answers:
        assert not found.keys() & answer.keys()
        found |= answer

    model = hugging_face(family)
    recorded = RecordedRouters(model, family)
    with torch.no_grad():
        for ids, _ in sequences(units()):
            model(ids[:, :-1])
    assert found.keys() == recorded.layers.keys()
    for number, passes in recorded.layers.items():
        chosen, scores = (torch.cat([getattr(one, what) for one in passes]) for what in ("chosen", "scores"))
        assert found[number].top_k == int(chosen[0].sum())
        assert found[number].tokens == len(chosen)
        assert list(found[number].loads) == chosen.sum(0).tolist()
        torch.testing.assert_close(torch.tensor(found[number].scores).double(), scores.sum(0), rtol=1e-5, atol=0)
        entropy = -(scores * scores.log()).sum()
        assert found[number].entropy == pytest.approx(float(entropy), rel=1e-5)


def capped(rank: int, world_size: int, folder: Path) -> Any:
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    options = ModelOptions(str(folder), Layout(), megatron={"moe_expert_capacity_factor": 1.0})
    role = RankModel(options, OptimizerOptions(lr=0.0))
    return role.update(micro_batches(MODES["packed"], 1)[0], objective)[EXPERTS]


def test_choices_that_a_capacity_dropped_are_counted(world: World, tmp_path: Path) -> None:
    from megarl.observe.expert_load import routing_figures

    build_folder("mixtral", tmp_path / "mixtral")
    found = world.call(capped, tmp_path / "mixtral", size=1)[0]
    dropped = [1 - sum(row.loads) / (row.top_k * row.tokens) for row in found.values()]
    assert min(dropped) > 0.01
    assert routing_figures(found)["dropped_choices"] == pytest.approx(sum(dropped) / len(dropped))
