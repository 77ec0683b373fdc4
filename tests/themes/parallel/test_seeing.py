"""Every layout of a model that sees computes what transformers computes in one process, tower included.

As in test_parity.py, with a table of its own. A layout whose first chunk has fewer layers than those behind which
features are added is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.stream import Response, Unit
from megarl.errors import LayoutError
from megarl.models.expert_tensors import joined
from megarl.models.hf_folder import fused_of
from megarl.models.shape import ModelShape
from tests.seeing import SEEING, build_seeing_folder, by_hugging_face, hf_config, pictures, units, units_of_turns, vision_of
from tests.themes.parallel.cells import matrix
from tests.themes.parallel.comparison import TOLERANCE, compare
from tests.themes.parallel.planted import run_spec, run_with_error
from tests.themes.parallel.report import Report
from tests.themes.parallel.worlds import LAYOUTS, TEMPERATURE, layout_for, run_family
from tests.world import World, WorldFailure

IN_EVERY_RUN = {
    ("cp2", "qwen2_vl"), ("tp2·cp2+sp", "qwen2_5_vl"), ("vpp2", "qwen2_5_vl"), ("dp2", "qwen2_5_vl"), ("tp2+sp", "qwen3_vl"),
    ("pp2·cp2", "qwen3_vl"), ("ep2·tp2+sp", "qwen3_vl_moe"), ("ep2", "glm4v_moe"), ("cp2", "kimi_k25"), ("ep2", "kimi_k25"),
}  # fmt: skip
"""What `make test` computes of the matrix: together every dimension, and each family. Eight ranks (tp2·pp2·cp2) are pp2·cp2 and
tp2·cp2+sp at once."""


def first_chunk(layout_name: str) -> int:
    """Layers of the first model chunk of four."""
    return len(LAYOUTS[layout_name].stage_layers(4)[0][0])


CELLS = [
    (layout, name)
    for name, family in SEEING.items()
    for layout in LAYOUTS
    if layout_for(layout, experts=family.num_experts is not None) and first_chunk(layout) >= len(vision_of(name).deepstack)
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A family's folder, media folder, tensors, values by response and gradients, by transformers, each computed once."""
    known: dict[str, dict[str, Any]] = {}

    def get(family: str) -> dict[str, Any]:
        if family not in known:
            folder = tmp_path_factory.mktemp("seeing") / family
            build_seeing_folder(family, folder)
            pictures(family, folder / "media")
            found = by_hugging_face(family, folder / "media", TEMPERATURE)
            known[family] = {"folder": folder, "media": folder / "media", **found}
        return known[family]

    return get


@pytest.mark.parametrize(
    ("layout", "family", "names"),
    matrix(
        CELLS,
        IN_EVERY_RUN,
        one_by_one={("cp2", "qwen2_vl"), ("tp2+sp", "qwen3_vl"), ("ep2", "glm4v_moe")},
        recomputed={("vpp2", "qwen2_5_vl"), ("tp2+sp", "qwen3_vl"), ("ep2", "kimi_k25")},
    ),
)
def test_every_layout_sees_what_transformers_sees(
    parity_world: World,
    reference: Callable[[str], dict[str, Any]],
    seeing_report: Report,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    expected = reference(family)
    of_ranks = layout_for(layout, experts=SEEING[family].num_experts is not None)
    arguments = (expected["folder"], of_ranks, units(family), expected["media"], names)
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    fused = fused_of(hf_config(family).to_dict())
    stored = (lambda tensors: dict(joined(fused, tensors.items()))) if fused else (lambda tensors: tensors)
    compare(expected, answers, partial(seeing_report.add, layout, family), stored)


WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
"""The decoder's last two of four layers have a window, shorter than a picture."""
WITH_WINDOWS = [("tp2+sp", "qwen2_vl"), ("pp2", "qwen2_5_vl"), ("cp2", "qwen2_5_vl"), ("cp4", "qwen2_vl")]


@pytest.mark.parametrize(
    ("layout", "family", "names"), matrix(WITH_WINDOWS, {("cp2", "qwen2_5_vl")}, modes=("packed", "unpacked"))
)
def test_windows_of_the_decoder_count_the_tokens_of_pictures_as_transformers_does(
    parity_world: World,
    reference: Callable[[str], dict[str, Any]],
    seeing_report: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    """A token of a picture counts as one, whatever its position on the axes."""
    without, folder = reference(family)["values"], tmp_path / "model"
    for name, value in WINDOWS.items():
        monkeypatch.setitem(SEEING[family].text, name, value)
    build_seeing_folder(family, folder)
    pictures(family, folder / "media")
    expected = by_hugging_face(family, folder / "media", TEMPERATURE)
    assert max(float((expected["values"][index] - without[index]).abs().max()) for index in without) > 1e-2
    arguments = (folder, LAYOUTS[layout], units(family), folder / "media", names)
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(seeing_report.add, f"{layout}, windows", family))


IN_TURNS = [
    (layout, family) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl") for layout in ("tp2", "tp2+sp", "pp2", "cp2", "dp2")
] + [(layout, "kimi_k25") for layout in ("tp2+sp", "pp2", "cp2", "dp2")]
IN_TURNS_IN_EVERY_RUN = {("dp2", "qwen2_5_vl"), ("cp2", "qwen2_5_vl"), ("tp2+sp", "qwen3_vl"), ("pp2", "qwen3_vl")}
IN_TURNS_IN_EVERY_RUN |= {("dp2", "kimi_k25")}


@pytest.fixture(scope="module")
def of_turns(reference: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """What transformers computes of `units_of_turns`, by family."""
    return functools.cache(
        lambda family: {
            **reference(family), **by_hugging_face(family, reference(family)["media"], TEMPERATURE, units_of_turns(family))
        }
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "family", "names"), matrix(IN_TURNS, IN_TURNS_IN_EVERY_RUN, {("dp2", "qwen2_5_vl")}))
def test_pictures_between_turns_are_seen_as_transformers_sees_them(
    parity_world: World,
    of_turns: Callable[[str], dict[str, Any]],
    seeing_report: Report,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    expected = of_turns(family)
    arguments = (expected["folder"], LAYOUTS[layout], units_of_turns(family), expected["media"], names)
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(seeing_report.add, f"{layout}, in turns", family))


def positions_as_of_text(shown: list[Unit]) -> list[Unit]:
    """Responses whose positions go on one by one, over their pictures too."""

    def behind(unit: Unit, response: Response) -> Response:
        first = len(unit.prompt_ids) if unit.positions is None else int(unit.positions.max()) + 1
        return replace(response, positions=torch.arange(first, first + len(response.token_ids)).expand(3, -1))

    return [replace(unit, responses=[behind(unit, response) for response in unit.responses]) for unit in shown]


def told_later(shown: list[Unit]) -> list[Unit]:
    """Features of told pictures one token behind their place."""

    def later(response: Response) -> Response:
        return replace(response, media=tuple(one.moved(1) for one in response.media))

    return [replace(unit, responses=[later(response) for response in unit.responses]) for unit in shown]


@pytest.mark.parametrize("planted", [positions_as_of_text, told_later])
def test_the_comparison_notices_an_error_between_turns(
    parity_world: World, of_turns: Callable[[str], dict[str, Any]], planted: Callable[[list[Unit]], list[Unit]]
) -> None:
    expected, worst = of_turns("qwen2_5_vl"), list[float]()
    given = planted(units_of_turns("qwen2_5_vl"))
    answers = parity_world.call(run_with_error, None, expected["folder"], given, expected["media"], size=1)
    with pytest.raises(AssertionError):
        compare(expected, answers, lambda mode, values, gradients: worst.extend((values, gradients)))
    assert min(worst) > 100 * TOLERANCE


def swapped_axes(shown: list[Unit]) -> list[Unit]:
    """Height and width exchanged."""
    return [replace(unit, positions=unit.positions[[0, 2, 1]]) if unit.positions is not None else unit for unit in shown]


def later_places(shown: list[Unit]) -> list[Unit]:
    """Features one token behind their place."""
    return [replace(unit, media=tuple(replace(media, place=media.place + 1) for media in unit.media)) for unit in shown]


@pytest.mark.parametrize(
    ("family", "planted"),
    [
        ("qwen2_5_vl", swapped_axes),
        ("qwen3_vl", swapped_axes),
        ("qwen2_5_vl", later_places),
        ("qwen2_5_vl", "windows"),
        ("qwen2_5_vl", "sections"),
        ("qwen3_vl", "sections"),
        ("qwen3_vl", "deepstack"),
        ("glm4v_moe", swapped_axes),
        ("glm4v_moe", later_places),
        ("glm4v_moe", "sections"),
        ("glm4v_moe", "convolution"),
        ("glm4v_moe", "position table"),
        ("kimi_k25", later_places),
        ("kimi_k25", "pairs"),
        ("kimi_k25", "sides"),
    ],
)
def test_the_comparison_notices_a_planted_error(
    parity_world: World,
    reference: Callable[[str], dict[str, Any]],
    family: str,
    planted: str | Callable[[list[Unit]], list[Unit]],
) -> None:
    expected, given = reference(family), units(family)
    error = planted if isinstance(planted, str) else None
    given = given if isinstance(planted, str) else planted(given)
    answers = parity_world.call(run_with_error, error, expected["folder"], given, expected["media"], size=1)
    worst: list[float] = []
    with pytest.raises(AssertionError):
        compare(expected, answers, lambda mode, values, gradients: worst.extend((values, gradients)))
    assert min(worst) > 100 * TOLERANCE


@pytest.mark.parametrize("layout", ["vpp2", "pp4", "pp2 uneven"])
def test_features_behind_more_layers_than_the_first_chunk_has_are_refused(layout: str, reference: Any) -> None:
    shape = ModelShape.read(reference("qwen3_vl")["folder"])
    with pytest.raises(LayoutError, match="the vision tower adds features behind 2; it must be "):
        LAYOUTS[layout].check_model(**shape.layout_sizes)
    LAYOUTS["pp2"].check_model(**shape.layout_sizes)


def test_the_refusal_on_ranks(parity_world: World, reference: Any) -> None:
    with pytest.raises(
        WorldFailure, match="the vision tower adds features behind 2 layers; they must be in the first model chunk"
    ):
        parity_world.call(run_family, reference("qwen3_vl")["folder"], LAYOUTS["vpp2"], units("qwen3_vl"), size=2)


def test_copies_of_a_prompt_share_the_features_of_its_pictures(parity_world: World, reference: Any) -> None:
    """megarl's `local` layer spec gives each response a prompt of its own; the tower still sees each picture once."""
    expected = reference("qwen2_5_vl")
    [answer] = parity_world.call(
        run_spec, "local", expected["folder"], units("qwen2_5_vl"), expected["media"], size=1
    )  # fmt: skip
    compare(expected, [answer], lambda *of_mode: None)
    assert answer["pictures"] == [["wide"], ["high", "wide", "frame0", "flat"]]
