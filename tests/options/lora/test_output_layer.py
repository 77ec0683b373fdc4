"""Adapters of the output layer: log-probs and gradients are peft's in every kind of layout, tied or not."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.models.hf_folder import HFFolder
from megarl.options.lora.section import ALL_LINEAR, OUTPUT
from tests.families import build_folder, by_hub_name, hugging_face
from tests.options.lora import adapters
from tests.themes.parallel.adapted import run_adapted
from tests.themes.parallel.comparison import compare, deviations, joined
from tests.themes.parallel.test_parity import values_of
from tests.themes.parallel.worlds import units
from tests.world import World

LORA = replace(adapters.LORA, targets=(ALL_LINEAR, OUTPUT))
ALONE = replace(adapters.LORA, targets=(OUTPUT,))
UNTIED, TIED = "llama", "qwen3-tied"


def by_peft(family: str, folder: Path, lora: Any) -> dict[str, Any]:
    """The model by peft in one process: its adapters, values and gradients, and what they are without and merged."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*|.*tied_target_modules.*|.*no longer tied.*")
        made = adapters.with_adapters(hugging_face(family), folder, lora)
        own = {name: tensor.clone() for name, tensor in adapters.tensors(made).items()}
        exact = adapters.with_adapters(hugging_face(family), folder, lora).double()
        values, gradients = values_of(exact), adapters.tensors(exact, gradients=True)
        head = made.base_model.model.lm_head
        if head.base_layer.weight is made.get_input_embeddings().weight:  # peft would merge into the embedding, too, and warns
            head.base_layer.weight = torch.nn.Parameter(head.base_layer.weight.detach().clone())
        merged = made.merge_and_unload()
    off = values_of(hugging_face(family))
    return {
        "tensors": own,
        "values": values,
        "gradients": gradients,
        "off": off,
        "merged": by_hub_name(merged, merged.state_dict().items()),
    }


@pytest.mark.parametrize(
    ("family", "layout", "lora", "names"),
    [
        (UNTIED, Layout(tp=2), LORA, ("packed", "unpacked, full recomputation")),
        (UNTIED, Layout(tp=2, cp=2, sequence_parallel=True), LORA, ("packed",)),
        (UNTIED, Layout(pp=2, dp=2), ALONE, ("packed",)),
        (TIED, Layout(tp=2, sequence_parallel=True), LORA, ("packed", "packed, selective recomputation")),
        (TIED, Layout(pp=2), LORA, ("packed",)),
        (TIED, Layout(), ALONE, ("packed",)),
    ],
    ids=["tp2", "tp2·cp2+sp", "pp2·dp2, alone", "tied, tp2+sp", "tied, pp2", "tied, one rank, alone"],
)
def test_log_probs_and_gradients_are_those_of_peft(
    world: World, tmp_path: Path, family: str, layout: Layout, lora: Any, names: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    build_folder(family, folder)
    assert bool(HFFolder(folder).config.get("tie_word_embeddings")) == (family == TIED)
    expected = by_peft(family, folder, lora)
    assert {"lm_head.lora_A.weight", "lm_head.lora_B.weight"} <= expected["tensors"].keys()
    arguments = (folder, layout, units(), lora, expected["tensors"], names)
    answers = world.call(run_adapted, *arguments, size=layout.world_size)
    compare(expected, answers, lambda *of_mode: None)
    without = joined(answer["off"] for answer in answers)
    assert max(deviations(without, expected["off"], lambda wanted: wanted.abs().clamp_min(1.0)).values()) < 1e-5
    merged = joined(answer["merged"] for answer in answers)
    assert "lm_head.weight" in merged
    assert merged.keys() == expected["merged"].keys()
    assert max(deviations(merged, expected["merged"], lambda wanted: wanted.abs().clamp_min(0.1)).values()) < 1e-6
    assert max(float((with_them - expected["off"][row]).abs().max()) for row, with_them in expected["values"].items()) > 0.1
