"""Replayed routes in every layout: routers that are told where to send tokens compute what Hugging Face does if it is told the
same, and recorded routes give the run again that made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import Unit
from megarl.option_list import OPTIONS
from tests.families import build_folder, hub_gradients, hub_tensors, hugging_face
from tests.themes.parallel.cells import matrix
from tests.themes.parallel.comparison import compare
from tests.themes.parallel.report import Report
from tests.themes.parallel.routed import run_recorded, run_replay, with_routes
from tests.themes.parallel.worlds import LAYOUTS, TEMPERATURE, layout_for, units
from tests.world import World

EXPERTS = {"mixtral": (4, 4, 2), "qwen3_moe": (3, 4, 2), "deepseek_v3": (3, 8, 2), "glm4_moe": (3, 8, 3)}
EXPERTS |= {"longcat_flash": (4, 12, 4)} if "shortcut_experts" in OPTIONS else {}
"""Of each family how many layers have experts, how many experts, and how many of them a token uses."""
UNNORMALISED, GROUPED = "qwen3_moe-unnormalised", "glm4_moe-grouped"
MORE = {UNNORMALISED: (2, 4, 2), GROUPED: (2, 8, 4)}
REPRESENTATIVES = {
    ("vpp2", "qwen3_moe"), ("pp2 uneven", "deepseek_v3"), ("ep2·tp2+sp", "mixtral"), ("ep2·etp2", "deepseek_v3"),
    ("tp2·cp2+sp", "glm4_moe"),
}  # fmt: skip
ONE = {("vpp2", "qwen3_moe")}
CELLS = [(layout, family) for layout in LAYOUTS for family in EXPERTS if layout_for(layout, experts=True) is not None]


@pytest.fixture(scope="module")
def replay_world() -> Iterator[World]:
    with World(8) as world:
        yield world


class ToldRouters:
    """A transformers model in float64 (in float32 its own gradients are off by 2e-5) whose routers send tokens to `experts`
    `[T, layers, k]`, and score by the family's formula."""

    def __init__(self, family: str) -> None:
        self.model = hugging_face(family).double()
        self.experts = torch.zeros(0)
        mlps = [layer.mlp for layer in self.model.model.layers if hasattr(layer.mlp, "experts")]
        gates = [mlp.gate if hasattr(mlp, "gate") else mlp.router for mlp in mlps]
        for place, gate in enumerate(gates):
            gate.forward = partial(self.route, gate, gate.forward, place)

    def route(self, gate: Any, live: Any, place: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat, config = hidden.reshape(-1, hidden.shape[-1]), self.model.config
        logits = flat @ (gate.classifier if hasattr(gate, "classifier") else gate).weight.T
        told = self.experts[:, place]
        chosen = torch.where(told[:, :1] < 0, live(hidden)[2].sort(-1).values, told)
        if config.model_type in ("mixtral", "qwen3_moe"):
            weights = logits.softmax(-1).gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) if getattr(config, "norm_topk_prob", True) else weights
        elif config.model_type == "longcat_flash":
            weights = logits.softmax(-1).gather(1, chosen) * config.routed_scaling_factor
        else:
            weights = logits.sigmoid().gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
        return logits, weights, chosen


def by_hugging_face(family: str, given: list[Unit]) -> dict[str, Any]:
    """Values and gradients as in `test_parity.by_hugging_face`, with the routes of `given`."""
    told, values = ToldRouters(family), {}
    for unit in given:
        for response in unit.responses:
            routes = torch.cat([unit.extra["routes"], response.extra["routes"]]).long()
            routes[-1] = torch.arange(routes.shape[-1])  # of a token that nothing follows
            told.experts = torch.where(routes == 255, -1, routes)
            ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
            logits = told.model(ids).logits[0, len(unit.prompt_ids) - 1 : -1].double() / TEMPERATURE
            log_p = logits.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            both = torch.stack([log_p.gather(1, response.token_ids[:, None])[:, 0], entropy], -1)
            loss = -(response.columns["weights"] * (both[:, 0] + 0.3 * both[:, 1]))[response.mask].sum()
            loss.backward()
            values[response.index] = both.detach() * response.mask[:, None]
    return {"tensors": hub_tensors(hugging_face(family)), "values": values, "gradients": hub_gradients(told.model)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """A family's folder, units with routes, and what transformers computes with these; each made once."""
    made: dict[tuple[str, float], dict[str, Any]] = {}

    def get(family: str, missing: float = 0.0) -> dict[str, Any]:
        if (family, missing) not in made:
            folder = tmp_path_factory.mktemp("families") / family
            build_folder(family, folder)
            given = with_routes(units(), *(EXPERTS | MORE)[family], missing)
            made[family, missing] = {"folder": folder, "units": given, **by_hugging_face(family, given)}
        return made[family, missing]

    return get


@pytest.mark.parametrize(("layout", "family", "names"), matrix(CELLS, REPRESENTATIVES, ONE, ONE))
def test_tokens_go_where_the_routes_say_in_every_layout(
    replay_world: World,
    reference: Callable[..., dict[str, Any]],
    parity_report: Report,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    expected, of_ranks = reference(family), layout_for(layout, experts=True)
    arguments = (expected["folder"], of_ranks, expected["units"], names)
    answers = replay_world.call(run_replay, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(parity_report.add, f"{layout}, replay", family))
    for name in names:  # random routes are seldom those of the router
        replayed, differing = map(sum, zip(*(answer["modes"][name]["counts"] for answer in answers), strict=True))
        assert 0.3 * replayed < differing < 0.9 * replayed


@pytest.mark.parametrize("family", [UNNORMALISED, GROUPED])
def test_weights_are_scored_as_the_family_scores_them(
    replay_world: World, reference: Callable[..., dict[str, Any]], parity_report: Report, family: str
) -> None:
    expected = reference(family)
    answers = replay_world.call(run_replay, expected["folder"], Layout(), expected["units"], ("packed",), size=1)
    compare(expected, answers, partial(parity_report.add, "one rank, replay", family))


@pytest.mark.parametrize(("layout", "family"), [("pp2", "qwen3_moe"), ("tp2·cp2+sp", "deepseek_v3")])
def test_tokens_without_a_known_choice_are_routed_live(
    replay_world: World, reference: Callable[..., dict[str, Any]], parity_report: Report, layout: str, family: str
) -> None:
    expected, of_ranks = reference(family, 0.4), layout_for(layout, experts=True)
    names = ("packed", "packed, full recomputation")
    arguments = (expected["folder"], of_ranks, expected["units"], names)
    answers = replay_world.call(run_replay, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(parity_report.add, f"{layout}, partial replay", family))
    once, recomputed = (sum(answer["modes"][name]["counts"].replayed for answer in answers) for name in names)
    assert once == recomputed > 0, "what is computed again is not counted again"


@pytest.mark.parametrize(
    ("layout", "family", "recompute"),
    [("vpp2", "deepseek_v3", "full"), ("tp2·cp2+sp", "qwen3_moe", "none"), ("ep2·tp2+sp", "glm4_moe", "full")],
)
def test_recorded_routes_give_the_run_again_bit_for_bit(
    replay_world: World, reference: Callable[..., dict[str, Any]], layout: str, family: str, recompute: str
) -> None:
    """And they are the choices that transformers makes."""
    folder, of_ranks = reference(family)["folder"], layout_for(layout, experts=True)
    answers = replay_world.call(run_recorded, folder, of_ranks, units(), recompute, size=LAYOUTS[layout].world_size)
    model, choices = hugging_face(family), []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(lambda module, given: choices.append(given[1]))
    routes = answers[0]["routes"]
    assert routes.keys() == {one.index for unit in units() for one in unit.responses}
    for unit in units():
        for one in unit.responses:
            choices.clear()
            model(torch.cat([unit.prompt_ids, one.token_ids])[None])
            expected = torch.stack(choices, 1).sort(-1).values[:-1].numpy()
            np.testing.assert_array_equal(np.sort(routes[one.index]), expected)
    for answer in answers:
        assert answer["counts"].replayed > 0
        assert answer["counts"].differing == 0
        for index, values in answer["live"].items():
            assert torch.equal(answer["replayed"][index], values)
        for name, gradient in answer["live gradients"].items():
            assert torch.equal(answer["replayed gradients"][name], gradient), name
