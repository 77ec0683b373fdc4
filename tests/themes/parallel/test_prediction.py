"""The layer for multi-token prediction in every layout: its gradients are the reference's, the decoder's stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import Response, Unit
from tests.families import VARIANTS, build_folder
from tests.predicting import DRAFTED, PREDICTING, all_tensors, build_predicting
from tests.themes.parallel.cells import matrix
from tests.themes.parallel.comparison import TOLERANCE
from tests.themes.parallel.predicted import by_transformers, run_predicting
from tests.themes.parallel.worlds import LAYOUTS, layout_for, units
from tests.world import World, WorldFailure

TIED, ONE_RANK = "glm4_moe-grouped", Layout()
CELLS = [
    (layout, name)
    for layout in LAYOUTS
    for name in (*PREDICTING, *DRAFTED, TIED)
    if layout_for(layout, **VARIANTS[name].kind) is not None
]
IN_EVERY_RUN = {
    ("tp2+sp", "deepseek_v3"),
    ("vpp2", "qwen3_5"),
    ("pp2", TIED),
    ("ep2·tp2+sp", "qwen3_next"),
    ("ep2·etp2", "glm4_moe"),
}
"""One of each kind of layout; tests below have another of cp and dp."""
KINDS = ("qwen3_5", "deepseek_v3", "glm4_moe", "llama")
"""One of each kind: linear attention, latent attention, partly rotated heads, a layer that the family has not."""
FAMILIES = [pytest.param(family, marks=() if family in KINDS else pytest.mark.exhaustive) for family in (*PREDICTING, *DRAFTED)]
ALONE = [("one rank", family) for family in (*PREDICTING, *DRAFTED)]
ALONE_IN_ALL_MODES = {("one rank", "deepseek_v3")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A family's folder, and what transformers' parts give for each kind of targets, computed once."""
    known: dict[str, dict[str, Any]] = {}

    def get(family: str) -> dict[str, Any]:
        if family not in known:
            folder = tmp_path_factory.mktemp("predicting") / family
            build_predicting(family, folder)
            known[family] = {"folder": folder, "tensors": all_tensors(family)}
            known[family] |= {targets: by_transformers(family, units(), targets) for targets in ("soft", "hard")}
        return known[family]

    return get


def joined(parts: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


def check(
    expected: dict[str, Any],
    answers: list[dict[str, Any]],
    targets: tuple[str, ...] = ("soft", "hard"),
    layout: Layout = ONE_RANK,
) -> None:
    """Sums over two ranks have one order; where more add up, what stands beside a gradient in a message moves its order."""
    least = 0.0 if max(layout.tp, layout.cp * layout.dp) <= 2 else 1e-6
    exported = joined(answer["exported"] for answer in answers)
    wanted = {name: expected["tensors"][name] for name in exported}
    copies = expected["tensors"].keys() - exported.keys()
    assert copies <= {f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())
    for mode in answers[0]["modes"]:
        of_mode = [answer["modes"][mode] for answer in answers]
        plain = joined(of_rank["none"]["gradients"] for of_rank in of_mode)
        for kind in targets:
            found = joined(of_rank[kind]["gradients"] for of_rank in of_mode)
            assert deviations(found, plain, least) == {}, (mode, kind)
            norm = of_mode[0]["none"]["norm"]  # summed in other shares where ranks share it out
            assert [of_rank[kind]["norm"] for of_rank in of_mode] == [pytest.approx(norm, rel=1e-6)] * len(of_mode)
            assert deviations(found, expected[kind]["gradients"]) == {}, (mode, kind)
            own = found.keys() - plain.keys()
            assert own >= expected[kind]["gradients"].keys()
            sums = {name: sum(of_rank[kind]["metrics"].get(name, 0.0) for of_rank in of_mode) for name in METRICS}
            assert sums["mtp_loss"] == pytest.approx(expected[kind]["loss"], rel=TOLERANCE)
            assert sums["mtp_accuracy"] == pytest.approx(expected[kind]["accuracy"], rel=TOLERANCE)


METRICS = ("mtp_loss", "mtp_accuracy")


def deviations(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> dict[str, float]:
    """Those of the gradients whose elements are off by more than the tolerance times the largest of them."""
    off = {
        name: float((found[name].double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
        for name, wanted in expected.items()
    }
    return {name: size for name, size in off.items() if size > tolerance}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_moves_every_parameter_and_its_targets_differ(
    reference: Callable[[str], dict[str, Any]], family: str
) -> None:
    soft, hard = (reference(family)[kind]["gradients"] for kind in ("soft", "hard"))
    assert sum(bool(gradient.any()) for gradient in soft.values()) > 0.9 * len(soft)
    assert deviations(soft, hard).keys() == {name for name, gradient in hard.items() if gradient.any()}


@pytest.mark.parametrize(("layout", "family", "names"), matrix(CELLS, IN_EVERY_RUN, {("pp2", TIED)}, {("vpp2", "qwen3_5")}))
def test_the_layers_gradients_are_those_of_transformers_and_the_decoders_do_not_know_of_it(
    parity_world: World, reference: Callable[[str], dict[str, Any]], layout: str, family: str, names: tuple[str, ...]
) -> None:
    expected, of_ranks = reference(family), layout_for(layout, **VARIANTS[family].kind)
    arguments = (run_predicting, expected["folder"], of_ranks, units(), ("soft", "hard"), names)
    assert of_ranks is not None
    check(expected, parity_world.call(*arguments, size=of_ranks.world_size, timeout_s=600), layout=of_ranks)


@pytest.mark.parametrize(
    ("layout", "family", "names"),
    matrix(ALONE, [cell for cell in ALONE if cell[1] in KINDS], ALONE_IN_ALL_MODES, ALONE_IN_ALL_MODES),
)
def test_one_rank_in_every_mode(
    parity_world: World, reference: Callable[[str], dict[str, Any]], layout: str, family: str, names: tuple[str, ...]
) -> None:
    expected, given = reference(family), (units(), ("soft", "hard"), names)
    check(expected, parity_world.call(run_predicting, expected["folder"], ONE_RANK, *given, size=1))


def short_units() -> list[Unit]:
    """Prompts of one token, of which a response's first token has no prediction, and responses of one token."""
    generator = torch.Generator().manual_seed(5)
    found, index = [], 0
    for prompt, lengths in ((1, (1, 6)), (2, (1, 4)), (1, (9, 2)), (1, (1, 1))):
        responses = []
        for length in lengths:
            tokens = torch.randint(0, 131, (length,), generator=generator)
            weights = torch.randn(length, generator=generator) / 20
            responses.append(Response(index, tokens, torch.rand(length, generator=generator) < 0.8, {"weights": weights}))
            index += 1
        found.append(Unit(torch.randint(0, 131, (prompt,), generator=generator), responses))
    return found


@pytest.mark.parametrize("layout", ["tp2+sp", "cp2", "dp2"])
def test_tokens_with_fewer_than_two_before_them_are_not_predicted(
    parity_world: World, reference: Callable[[str], dict[str, Any]], layout: str
) -> None:
    family = "glm4_moe"
    folder = reference(family)["folder"]
    expected = {"tensors": reference(family)["tensors"], "soft": by_transformers(family, short_units(), "soft")}
    of_ranks = layout_for(layout, **VARIANTS[family].kind)
    arguments = (run_predicting, folder, of_ranks, short_units(), ("soft",), ("packed", "unpacked"))
    check(expected, parity_world.call(*arguments, size=LAYOUTS[layout].world_size), ("soft",))


def test_a_stage_in_the_middle_takes_no_part_in_the_embedding_though_its_process_was_the_last_stage_before(
    parity_world: World, reference: Callable[[str], dict[str, Any]]
) -> None:
    expected = reference("glm4_moe")
    for layout in (Layout(pp=2), Layout(pp=4)):
        arguments = (run_predicting, expected["folder"], layout, units(), ("hard",), ("packed",))
        check(expected, parity_world.call(*arguments, size=layout.world_size), ("hard",), layout)


def test_a_folder_without_the_layer_is_refused_where_it_is_to_be_trained(parity_world: World, tmp_path: Path) -> None:
    build_folder("qwen3_5", tmp_path / "bare")
    with pytest.raises(WorldFailure, match=r"policy\.mtp\.train is true, but '.*bare' has no tensors of a layer"):
        parity_world.call(run_predicting, tmp_path / "bare", ONE_RANK, units(), ("soft",), ("packed",), size=1)
