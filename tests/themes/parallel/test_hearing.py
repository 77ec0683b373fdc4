"""Every layout of a model that hears computes what transformers computes in one process, tower and projector included."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.hearing import build_hearing_folder, by_hugging_face, sounds, units
from tests.themes.parallel.cells import matrix
from tests.themes.parallel.comparison import compare
from tests.themes.parallel.report import Report
from tests.themes.parallel.worlds import LAYOUTS, TEMPERATURE, layout_for, run_family
from tests.world import World

NAME = "qwen3_omni_moe_thinker"
CELLS = [(layout, NAME) for layout in LAYOUTS if layout_for(layout, experts=True)]
IN_EVERY_RUN = {("tp2+sp", NAME), ("pp2", NAME), ("ep2", NAME)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The folder, media folder, tensors, values by response and gradients, by transformers."""
    folder = Path(tmp_path_factory.mktemp("hearing")) / NAME
    build_hearing_folder(folder)
    sounds(folder / "media")
    return {"folder": folder, "media": folder / "media", **by_hugging_face(folder / "media", TEMPERATURE)}


@pytest.mark.parametrize(("layout", "family", "names"), matrix(CELLS, IN_EVERY_RUN, one_by_one={("ep2", NAME)}))
def test_every_layout_hears_what_transformers_hears(
    parity_world: World, reference: dict[str, Any], seeing_report: Report, layout: str, family: str, names: tuple[str, ...]
) -> None:
    of_ranks = layout_for(layout, experts=True)
    arguments = (reference["folder"], of_ranks, units(), reference["media"], names)
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    for answer in answers:
        for mode in answer["modes"].values():
            take_vanishing(mode["gradients"], reference["gradients"])
    compare(reference, answers, partial(seeing_report.add, layout, family))


def take_vanishing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Put the expected gradients of the tower's biases of keys into `found`, after they are seen to be nothing but rounding: a
    bias adds the same to all scores of a query."""
    for name in [name for name in found if name.startswith("audio_tower.") and name.endswith(".k_proj.bias")]:
        of_queries = expected[name.replace("k_proj", "q_proj")].abs().max()
        assert found[name].abs().max() < 1e-6 * of_queries, name
        assert expected[name].abs().max() < 1e-6 * of_queries, name
        found[name] = expected[name]
