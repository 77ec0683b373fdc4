"""Replayed keys in every layout: layers that are told which keys to attend to compute what Hugging Face does if it is told the
same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.data.stream import Unit
from megarl.option_list import OPTIONS
from tests.families import FAMILIES, build_folder, hub_gradients, hub_tensors, hugging_face
from tests.themes.parallel.cells import matrix
from tests.themes.parallel.comparison import TOLERANCE, compare, deviations, joined
from tests.themes.parallel.report import Report
from tests.themes.parallel.worlds import LAYOUTS, TEMPERATURE, layout_for, run_family, units
from tests.world import World

pytestmark = pytest.mark.skipif("sparse_attention" not in OPTIONS, reason="this installation does not have the option")
INDEXERS = {"deepseek_v32": 4, "glm_moe_dsa": 2}
"""How many layers have an indexer: of the second family every other one takes its choices."""
TOP_K, UNKNOWN = 5, 255
CELLS = [
    (layout, family)
    for layout in LAYOUTS
    for family in INDEXERS
    if family in FAMILIES and layout_for(layout, **FAMILIES[family].kind) is not None
]
REPRESENTATIVES = {("tp2·cp2+sp", "deepseek_v32"), ("pp2", "glm_moe_dsa"), ("cp4", "glm_moe_dsa")}
ONE = {("pp2", "glm_moe_dsa")}


def with_keys(given: list[Unit], indexers: int, missing: float = 0.0) -> list[Unit]:
    """`given` whose tokens attend to random keys before them, five or all; a share of the choices is `missing`."""
    generator = torch.Generator().manual_seed(13)
    width = -(-max(len(unit.prompt_ids) + len(one.token_ids) for unit in given for one in unit.responses) // 8)

    def keys(first: int, tokens: int) -> Tensor:
        position, column = first + torch.arange(tokens)[:, None, None], torch.arange(8 * width)
        order = torch.rand(tokens, indexers, 8 * width, generator=generator)
        rank = order.masked_fill(column > position, 2.0).argsort(-1).argsort(-1)
        chosen = (rank < TOP_K) & (column <= position)
        bits = (chosen.unflatten(-1, (width, 8)) << torch.arange(8)).sum(-1).to(torch.uint8)
        bits[torch.rand(tokens, indexers, generator=generator) < missing] = UNKNOWN
        return bits

    return [
        replace(
            unit,
            extra={"chosen_keys": keys(0, len(unit.prompt_ids))},
            responses=[
                replace(one, extra={"chosen_keys": keys(len(unit.prompt_ids), len(one.token_ids))}) for one in unit.responses
            ],
        )
        for unit in given
    ]


class ToldIndexers:
    """A transformers model in float64 whose indexers answer the keys in `bits` `[T, indexers, W]` where they are known."""

    def __init__(self, family: str) -> None:
        self.model, self.bits = hugging_face(family).double(), torch.zeros(0, dtype=torch.uint8)
        indexers = [module for name, module in self.model.named_modules() if name.endswith(".indexer")]
        for place, indexer in enumerate(indexers):
            indexer.forward = partial(self.choose, indexer.forward, place)

    def choose(self, live: Any, place: int, *given: Any, **named: Any) -> Tensor:
        answer = live(*given, **named)
        for token, bits in enumerate(self.bits[:, place]):
            if bool((bits == UNKNOWN).all()):
                continue
            chosen = torch.tensor(
                [8 * byte + bit for byte, of in enumerate(bits.tolist()) for bit in range(8) if of >> bit & 1]
            )
            answer[0, token] = chosen[torch.arange(answer.shape[-1]) % len(chosen)]
        return answer  # type: ignore[no-any-return]


def by_hugging_face(family: str, given: list[Unit]) -> dict[str, Any]:
    """Values and gradients as in `test_parity.by_hugging_face`, with the keys of `given`."""
    told, values = ToldIndexers(family), {}
    for unit in given:
        for response in unit.responses:
            told.bits = torch.cat([unit.extra["chosen_keys"], response.extra["chosen_keys"]])
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
    """A family's folder, units with keys, and what transformers computes with these; each made once."""
    made: dict[tuple[str, float], dict[str, Any]] = {}

    def get(family: str, missing: float = 0.0) -> dict[str, Any]:
        if (family, missing) not in made:
            folder = tmp_path_factory.mktemp("families") / family
            build_folder(family, folder)
            given = with_keys(units(), INDEXERS[family], missing)
            made[family, missing] = {"folder": folder, "units": given, **by_hugging_face(family, given)}
        return made[family, missing]

    return get


@pytest.mark.parametrize(("layout", "family", "names"), matrix(CELLS, REPRESENTATIVES, ONE, ONE))
def test_queries_attend_to_the_told_keys_in_every_layout(
    parity_world: World,
    reference: Callable[..., dict[str, Any]],
    parity_report: Report,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    expected = reference(family)
    arguments = (expected["folder"], layout_for(layout, **FAMILIES[family].kind), expected["units"], None, names)
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(parity_report.add, f"{layout}, keys replayed", family))
    plain = parity_world.call(run_family, *arguments[:2], units(), None, ("packed",), size=LAYOUTS[layout].world_size)
    live = joined(answer["modes"]["packed"]["values"] for answer in plain)
    assert max(deviations(live, expected["values"], lambda wanted: wanted.abs().clamp_min(1.0)).values()) > 100 * TOLERANCE


@pytest.mark.parametrize(("layout", "family"), [("cp2", "glm_moe_dsa"), ("tp2·cp2+sp", "deepseek_v32")])
def test_indexers_choose_where_no_choice_is_known(
    parity_world: World, reference: Callable[..., dict[str, Any]], parity_report: Report, layout: str, family: str
) -> None:
    expected, names = reference(family, 0.4), ("packed", "packed, full recomputation")
    arguments = (expected["folder"], layout_for(layout, **FAMILIES[family].kind), expected["units"], None, names)
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(parity_report.add, f"{layout}, some keys replayed", family))
