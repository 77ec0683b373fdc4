"""Adapters in every layout are what peft computes in one process: log-probs, every gradient element, and the weights merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.families import FAMILIES, build_folder, by_hub_name, hugging_face
from tests.options.lora import adapters
from tests.themes.parallel.adapted import run_adapted
from tests.themes.parallel.cells import matrix
from tests.themes.parallel.comparison import TOLERANCE, compare, deviations, joined
from tests.themes.parallel.test_parity import CELLS, values_of
from tests.themes.parallel.worlds import LAYOUTS, layout_for, units
from tests.world import World

SPREADS = {"kimi_k2": 0.05, "qwen3_next": 0.06}
"""Of the random values, where gradients of single experts nearly vanish: how far float32 is off these then depends on the
processor. For qwen3_next with 0.04 it was up to 1.1e-5 in some layouts with AVX-512 (peft's own up to 6.4e-6 with AVX-512, AVX2
or SSE4), with this one up to 8.9e-6 with any of them (peft's own 5.6e-6). kimi_k2's makes peft's own 4e-6."""


IN_EVERY_RUN = {
    ("tp2", "llama"), ("tp2+sp", "qwen3_next"), ("pp2", "gpt_oss"), ("vpp2", "glm4"), ("cp2", "olmo3"), ("dp2", "phi3"),
    ("ep2", "mixtral"), ("ep2·tp2+sp", "deepseek_v3"), ("ep2·etp2", "glm4_moe"),
}  # fmt: skip
"""Each kind of parallelism and each kind of layer that has adapters: fused and separate projections, latent and linear
attention, experts with and without biases. Other families have the same layers, other layouts the same kinds or more ranks."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A family's folder and, by peft in one process, values and gradients with adapters; `merged`: their weights."""
    known: dict[str, dict[str, Any]] = {}

    def get(family: str) -> dict[str, Any]:
        if family not in known:
            folder = tmp_path_factory.mktemp("adapters") / family
            build_folder(family, folder)
            spread = SPREADS.get(family, adapters.SPREAD)
            made = adapters.with_adapters(hugging_face(family), folder, spread=spread)
            own = {name: tensor.clone() for name, tensor in adapters.tensors(made).items()}
            exact = adapters.with_adapters(hugging_face(family), folder, spread=spread).double()
            values = values_of(exact)
            gradients = adapters.tensors(exact, gradients=True)
            merged = made.merge_and_unload()
            tied = merged.config.tie_word_embeddings
            state = ((name, value) for name, value in merged.state_dict().items() if not (tied and name == "lm_head.weight"))
            known[family] = {
                "folder": folder,
                "tensors": own,
                "values": values,
                "gradients": gradients,
                "off": values_of(hugging_face(family)),
                "merged": by_hub_name(merged, state),
            }
        return known[family]

    return get


@pytest.mark.parametrize(
    ("layout", "family", "names"),
    matrix(CELLS, IN_EVERY_RUN, {("tp2", "llama"), ("ep2", "mixtral")}, {("tp2+sp", "qwen3_next"), ("vpp2", "glm4")}),
)
def test_adapters_are_what_peft_computes(
    parity_world: World, reference: Callable[[str], dict[str, Any]], layout: str, family: str, names: tuple[str, ...]
) -> None:
    expected = reference(family)
    of_ranks = layout_for(layout, **FAMILIES[family].kind)
    arguments = (expected["folder"], of_ranks, units(), adapters.LORA, expected["tensors"], names)
    answers = parity_world.call(run_adapted, *arguments, size=LAYOUTS[layout].world_size)
    compare(expected, answers, lambda *of_mode: None)
    without = joined(answer["off"] for answer in answers)
    assert max(deviations(without, expected["off"], lambda wanted: wanted.abs().clamp_min(1.0)).values()) < TOLERANCE
    merged = joined(answer["merged"] for answer in answers)
    assert max(deviations(merged, expected["merged"], lambda wanted: wanted.abs().clamp_min(0.1)).values()) < 1e-6
    assert max(float((with_them - expected["off"][row]).abs().max()) for row, with_them in expected["values"].items()) > 0.1
