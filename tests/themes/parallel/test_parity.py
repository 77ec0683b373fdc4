"""Every layout computes what Hugging Face computes in one process: log-probs, every gradient element, and the same bytes out.

One call per layout and family fills the matrix; `--parity-report FILE` writes the worst deviation of each cell into FILE.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.data.prefix_tree import LEAST_SHARED
from megarl.data.stream import pack
from megarl.megatron.options import SamplingLimits
from tests.families import FAMILIES, ODD, build_folder, compressed, hub_gradients, hub_tensors, hugging_face
from tests.themes.parallel.cells import matrix
from tests.themes.parallel.comparison import compare
from tests.themes.parallel.report import Report
from tests.themes.parallel.worlds import LAYOUTS, MODES, ODD_LAYOUTS, TEMPERATURE, layout_for, run_family, units
from tests.world import World

CELLS = [
    (layout, name) for layout in LAYOUTS for name, family in FAMILIES.items() if layout_for(layout, **family.kind) is not None
]


def representatives() -> set[tuple[str, str]]:
    """A cell of every layout, with the families in turn: what `make test` computes of the matrix."""
    chosen: list[tuple[str, str]] = []
    for layout in LAYOUTS:
        candidates = [family for at, family in CELLS if at == layout]
        chosen.append((layout, min(candidates, key=[family for _, family in chosen].count)))
    for family in FAMILIES.keys() - {family for _, family in chosen}:
        chosen.append(next(cell for cell in CELLS if cell[1] == family))
    return set(chosen)


REPRESENTATIVES = representatives()
TWO_RANKS = {cell for cell in REPRESENTATIVES if LAYOUTS[cell[0]].world_size == 2}
RECOMPUTED = {cell for cell in TWO_RANKS if cell[0] in ("tp2+sp", "vpp2", "cp2", "ep2")}
"""Those that `make test` computes with recomputation, too: every kind of parallelism, and linear attention."""


def test_every_layout_and_every_family_is_represented() -> None:
    assert {layout for layout, _ in REPRESENTATIVES} == set(LAYOUTS)
    assert {family for _, family in REPRESENTATIVES} == set(FAMILIES)
    assert len(REPRESENTATIVES) <= max(len(LAYOUTS), len(FAMILIES)) + 2
    assert len(RECOMPUTED) >= 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A family's folder, tensors, values by response and gradients, by transformers in one process, each computed once."""
    known: dict[str, dict[str, Any]] = {}

    def get(family: str) -> dict[str, Any]:
        if family not in known:
            folder = tmp_path_factory.mktemp("families") / family
            build_folder(family, folder)
            known[family] = {"folder": folder, **by_hugging_face(family)}
        return known[family]

    return get


IN_FLOAT64 = ("qwen3_5", "olmo_hybrid", "deepseek_v4", "gemma4")
"""The families that Hugging Face computes in float64. In float32 its gradient of the gates' six biases is off by 2.6e-6 of the
largest, ours by up to 8.4e-6 to the other side, by the kind of CPU; OLMo hybrid's gradients are off by 4.6e-6, those of
DeepSeek-V4's hyper-connections by 9e-6, Gemma 4's by 6.2e-6."""


def by_hugging_face(family: str, top_p: float = 1.0, model: Any = None) -> dict[str, Any]:
    """Each response alone behind its prompt; log-softmax in float64, since float32's is itself off by 1e-5.

    `model` is computed in place of the family's own.

    With `top_p` it is over the tokens that are kept, the sampled one among them, and the log of their probability is a value.
    """
    model = hugging_face(family) if model is None else model
    computed = deepcopy(model).double() if family.startswith(IN_FLOAT64) else model
    values = values_of(computed, top_p)
    return {"tensors": hub_tensors(model), "values": values, "gradients": hub_gradients(computed)}


def values_of(model: Any, top_p: float = 1.0) -> dict[int, Tensor]:
    """By response what is compared of each token; the parameters have the gradients of the objective afterwards."""
    values: dict[int, Tensor] = {}
    for unit in units():
        for response in unit.responses:
            ids = torch.cat([unit.prompt_ids, response.token_ids])[None]
            with compressed.in_float64() if model.config.model_type == "deepseek_v4" else nullcontext():
                logits = model(ids).logits[0, len(unit.prompt_ids) - 1 : -1].double() / TEMPERATURE
            ordered, order = logits.detach().softmax(-1).sort(dim=-1, descending=True)
            left_out = torch.zeros_like(ordered, dtype=torch.bool).scatter_(1, order, ordered.cumsum(-1) - ordered >= top_p)
            left_out.scatter_(1, response.token_ids[:, None], False)
            kept = logits.detach().softmax(-1).masked_fill(left_out, 0.0).sum(-1).log()
            log_p = logits.masked_fill(left_out, -torch.inf).log_softmax(-1)
            entropy = -(log_p.exp() * log_p.masked_fill(left_out, 0.0)).sum(-1)
            columns = [log_p.gather(1, response.token_ids[:, None])[:, 0], entropy, *([kept] if top_p < 1 else [])]
            both = torch.stack(columns, -1)
            loss = -(response.columns["weights"] * (both[:, 0] + 0.3 * both[:, 1]))[response.mask].sum()
            loss.backward()
            values[response.index] = both.detach() * response.mask[:, None]
    return values


@pytest.mark.parametrize(("layout", "family", "names"), matrix(CELLS, REPRESENTATIVES, TWO_RANKS, RECOMPUTED))
def test_every_layout_computes_what_hugging_face_computes(
    parity_world: World,
    reference: Callable[[str], dict[str, Any]],
    parity_report: Report,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    expected = reference(family)
    arguments = (expected["folder"], layout_for(layout, **FAMILIES[family].kind), units(), None, names)
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(parity_report.add, layout, family))


BY_SEGMENTS = {
    ("tp2·cp2+sp", "llama"), ("cp2", "deepseek_v3"), ("cp4", "gpt_oss"), ("pp2", "qwen3_next"),
}  # fmt: skip
"""In every run; the other families and layouts are exhaustive."""
SEGMENT_CELLS = [(layout, family) for layout, family in CELLS if not FAMILIES[family].needs_reference]
PACKED = tuple(name for name, mode in MODES.items() if mode.packed)


def test_units_of_the_matrix_share_more_than_prompts() -> None:
    stream = pack(units())
    assert max(len(segment.path) for segment in stream.segments) == 2
    sequences = sum(len(unit.prompt_ids) + len(response.token_ids) - 1 for unit in units() for response in unit.responses)
    prompts = sum(len(unit.prompt_ids) * (len(unit.responses) - 1) for unit in units())
    assert len(stream.token_ids) == sequences - prompts - LEAST_SHARED


@pytest.mark.parametrize(
    ("layout", "family", "names"), matrix(SEGMENT_CELLS, BY_SEGMENTS, recomputed={("tp2·cp2+sp", "llama")}, modes=PACKED)
)
def test_attention_by_segments_computes_what_hugging_face_computes(
    parity_world: World,
    reference: Callable[[str], dict[str, Any]],
    parity_report: Report,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    """What Transformer Engine's layers share prefixes with, under the layers that run on a CPU."""
    expected, of_ranks = reference(family), layout_for(layout, **FAMILIES[family].kind)
    arguments = (expected["folder"], of_ranks, units(), None, names, "reference", None, 0, "segments")
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(parity_report.add, f"{layout}, by segments", family))


def test_local_layers_share_prefixes_by_segments(
    parity_world: World, reference: Callable[[str], dict[str, Any]], parity_report: Report
) -> None:
    expected = reference("qwen2-full")
    arguments = (expected["folder"], LAYOUTS["tp2"], units(), None, PACKED, "local", None, 0, "segments")
    compare(expected, parity_world.call(run_family, *arguments, size=2), partial(parity_report.add, "tp2, local", "qwen2-full"))


ODD_CELLS = [
    (layout, name) for layout in ODD_LAYOUTS for name, family in ODD.items() if layout_for(layout, **family.kind) is not None
]
ODD_IN_EVERY_RUN = {("tp3", "olmo2-odd"), ("pp3 uneven", "glm4-odd"), ("ep3", "kimi_k2-odd"), ("tp3+sp", "phi3-odd")}


@pytest.mark.parametrize(("layout", "family", "names"), matrix(ODD_CELLS, ODD_IN_EVERY_RUN))
def test_three_ranks_share_three_heads_and_six_experts(
    parity_world: World, reference: Callable[[str], dict[str, Any]], layout: str, family: str, names: tuple[str, ...]
) -> None:
    expected, of_ranks = reference(family), layout_for(layout, **ODD[family].kind)
    arguments = (expected["folder"], of_ranks, units(), None, names)
    answers = parity_world.call(run_family, *arguments, size=ODD_LAYOUTS[layout].world_size)
    compare(expected, answers, lambda *of_mode: None)


WITH_BIASES = [("tp2", "llama-biases"), ("tp2+sp", "llama-biases")]


@pytest.mark.parametrize(("layout", "family", "names"), matrix(WITH_BIASES, WITH_BIASES, WITH_BIASES[:1]))
def test_biases_of_all_projections_are_split_and_summed_as_they_must(
    parity_world: World,
    reference: Callable[[str], dict[str, Any]],
    parity_report: Report,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    expected = reference(family)
    answers = parity_world.call(run_family, expected["folder"], LAYOUTS[layout], units(), None, names, size=2)
    compare(expected, answers, partial(parity_report.add, layout, family))


WITH_TOP_P = [("tp2+sp", "llama"), ("pp2", "llama"), ("cp2", "llama")]


@pytest.mark.parametrize(("layout", "family", "names"), matrix(WITH_TOP_P, WITH_TOP_P, WITH_TOP_P[1:2]))
def test_log_probs_over_the_tokens_that_top_p_keeps(
    parity_world: World,
    reference: Callable[[str], dict[str, Any]],
    parity_report: Report,
    layout: str,
    family: str,
    names: tuple[str, ...],
) -> None:
    expected = reference(family) | by_hugging_face(family, top_p=0.9)
    assert min(float(values[:, 2].min()) for values in expected["values"].values()) < -0.05  # tokens are left out
    arguments = (expected["folder"], LAYOUTS[layout], units(), None, names, "reference", SamplingLimits(top_p=0.9))
    answers = parity_world.call(run_family, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, partial(parity_report.add, f"{layout}, top-p", family))
