"""Quantisation-aware training in every kind of layout: values and gradients are those of transformers with the experts' weights
as compressed-tensors decodes them, gradients are the weights' own, and what is exported is not rounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families import WIDE, build_folder, by_hub_name, hub_tensors, hugging_face
from tests.themes.parallel.comparison import compare
from tests.themes.parallel.test_parity import by_hugging_face
from tests.themes.parallel.worlds import LAYOUTS, layout_for, run_family, units
from tests.world import World

MODES = ("packed", "unpacked, full recomputation")
CELLS = {("mixtral-wide", "tp2+sp"), ("kimi_k2-wide", "ep2·etp2"), ("kimi_k2-wide", "tp2·pp2·cp2")}
MATRIX = [
    pytest.param(family, layout, id=f"{family}-{layout}", marks=() if (family, layout) in CELLS else pytest.mark.exhaustive)
    for family in WIDE
    for layout in ("tp2+sp", "pp2", "cp2", "dp2", "ep2", "ep2·tp2+sp", "ep2·etp2", "tp2·pp2·cp2")
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(8) as world:
        yield world


def decoded(rows: Tensor) -> Tensor:
    """A weight as compressed-tensors reads back what it packed, with scales that map a group's largest magnitude to 7."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    arguments = quantization.QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=32)
    scales = (rows.unflatten(1, (-1, 32)).abs().amax(2) / 7).bfloat16().float()
    read: Tensor = fake_quantize(rows, scales, torch.zeros_like(scales), arguments)
    return read


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a family its folder and tensors, and the values and gradients of transformers with decoded experts."""
    known: dict[str, dict[str, Any]] = {}

    def get(family: str) -> dict[str, Any]:
        if family not in known:
            folder = tmp_path_factory.mktemp("wide") / family
            build_folder(family, folder)
            model = hugging_face(family)
            with torch.no_grad():
                for name, weight in by_hub_name(model, iter(model.named_parameters())).items():
                    if ".experts." in name:
                        weight.copy_(decoded(weight.clone()))
            found = by_hugging_face(family, model=model)
            known[family] = {
                "folder": folder,
                **found,
                "tensors": hub_tensors(hugging_face(family)),
                "decoded": found["tensors"],
            }
        return known[family]

    return get


@pytest.mark.parametrize(("family", "layout"), MATRIX)
def test_ranks_compute_with_what_an_engine_decodes(world: World, expected: Any, family: str, layout: str) -> None:
    wanted, of_ranks = expected(family), layout_for(layout, experts=True)
    assert of_ranks is not None
    changed = [name for name, tensor in wanted["tensors"].items() if not torch.equal(tensor, wanted["decoded"][name])]
    assert changed
    assert all(".experts." in name for name in changed)
    answers = world.call(
        run_family, Path(wanted["folder"]), of_ranks, units(), None, MODES, "reference", None, 32, size=of_ranks.world_size
    )
    compare(wanted, answers, lambda *of_mode: None)
    assert LAYOUTS[layout].world_size == of_ranks.world_size


def rounded_bits(rank: int, world_size: int, folder: str, dtype: str) -> tuple[int, list[str], list[str]]:
    """(weights that layers computed with, those that are not what a quantiser decodes, names whose order or object changed)."""
    from megarl.config.layout import Layout
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.global_names import global_tensors
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.options.few_bits.formats import int4
    from megarl.options.few_bits.quantise import FormatQuantiser
    from megarl.options.few_bits.tensors import dequantised

    layout = Layout(tp=2, etp=2, sequence_parallel=True)
    initialize_layout(layout, seed=1)
    role = RankModel(ModelOptions(folder, layout, dtype=dtype, int4_experts=32))
    before = [(name, id(tensor)) for name, tensor in global_tensors(role.chunks)]
    quantiser, seen, wrong = FormatQuantiser(int4(32)), 0, []
    from megatron.core.utils import unwrap_model

    for name, layer in unwrap_model(role.chunks[0]).named_modules():
        if name.endswith(("linear_fc1", "linear_fc2")) and ".experts." in name:
            rule = role.weight_map.rule_for(f"{name}.weight")
            parts = quantiser(rule, layer.weight.detach(), rank, 2, lambda values: None)
            words, scales = (parts[rule.megatron_name + suffix] for suffix in ("_packed", "_scale"))
            sent = dequantised(words, scales, int4(32)).to(layer.weight.dtype)

            def look(layer: Any, arguments: Any, sent: Tensor = sent, name: str = name) -> None:
                nonlocal seen
                seen += 1
                if not torch.equal(layer.weight, sent):
                    wrong.append(name)

            layer.register_forward_pre_hook(look)
    from tests.themes.parallel.worlds import MODES as ALL
    from tests.themes.parallel.worlds import micro_batches

    role.forward(micro_batches(ALL["packed"], 1)[0])
    after = [(name, id(tensor)) for name, tensor in global_tensors(role.chunks)]
    return seen, wrong, [name for (name, one), (other, two) in zip(before, after, strict=True) if (name, one) != (other, two)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_compute_with_the_bits_that_engines_decode(world: World, expected: Any, dtype: str) -> None:
    answers = world.call(rounded_bits, str(expected("mixtral-wide")["folder"]), dtype, size=2)
    assert all(seen >= 4 * 4 * 2 for seen, _, _ in answers)
    assert [(wrong, moved) for _, wrong, moved in answers] == [([], [])] * 2
