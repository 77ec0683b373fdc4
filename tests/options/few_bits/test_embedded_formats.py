"""The embedded engine with a folder in few bits: it computes with the values that transformers would, however they come."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megarl.config.layout import Layout
from megarl.errors import EngineError
from megarl.models.transformers_names import hub_tensors
from megarl.options.few_bits.formats import FORMATS
from megarl.options.few_bits.tensors import Dequantiser, dequantised
from megarl.rollout.engines.embedded import EmbeddedEngine
from tests.convert.conftest import exported, imported, tensors
from tests.families import build_folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral, beside it its distributed checkpoint."""
    folder = tmp_path_factory.mktemp("models") / "hf"
    build_folder("mixtral-wide", folder)
    imported(folder, folder.parent / "dist", Layout())
    return folder


def decoded(served: Path, dtype: str) -> dict[str, Tensor]:
    """What the folder's tensors stand for, in float32, by weight."""
    format, found, values = FORMATS[dtype], tensors(served), {}
    beside = (format.suffixes[1], "_shape")
    for name, tensor in found.items():
        if name.endswith(beside):
            continue
        weight = name.removesuffix(format.suffixes[0])
        scales = found.get(weight + format.suffixes[1])
        values[weight] = tensor.float() if scales is None else dequantised(tensor, scales, format)
    return values


async def updated(engine: EmbeddedEngine, version: int, sent: list[tuple[str, Tensor]], base: int | None = None) -> None:
    await engine.begin_update(version, base)
    await engine.apply_update(sent)
    await engine.end_update(version)


@pytest.mark.parametrize("dtype", ["fp8-block", "mxfp8", "int4-32"])
def test_it_begins_with_the_folder_and_takes_what_the_folder_stores(wide: Path, tmp_path: Path, dtype: str) -> None:
    exported(wide.parent / "dist", tmp_path / "few", dtype=dtype)
    engine = EmbeddedEngine(wide, served_path=tmp_path / "few", initial_version=0)
    wanted = decoded(tmp_path / "few", dtype)
    assert engine.served_model.format == FORMATS[dtype]
    for name, values in wanted.items():
        assert torch.equal(engine._held[name], values), name
    assert engine._held.keys() == wanted.keys()

    torch.manual_seed(5)
    other = transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.01 * torch.randn(weight.shape)
    from megarl.models.hf_folder import write_hf_folder

    config = other.config.to_dict() | {"architectures": ["MixtralForCausalLM"]}
    write_hf_folder(tmp_path / "other", hub_tensors(other).items(), config)
    imported(tmp_path / "other", tmp_path / "other-dist", Layout())
    exported(tmp_path / "other-dist", tmp_path / "new", dtype=dtype)
    sent = sorted(tensors(tmp_path / "new").items(), key=lambda pair: pair[0][::-1])  # parts of a weight far from each other
    asyncio.run(updated(engine, 1, sent))
    assert engine.weight_version == 1
    for name, values in decoded(tmp_path / "new", dtype).items():
        assert torch.equal(engine._held[name], values), name
    # of a weight whose scales stay, the numbers alone may come
    format = FORMATS[dtype]
    weight = next(name.removesuffix(format.suffixes[1]) for name, _ in sent if name.endswith(format.suffixes[1]))
    numbers = dict(sent)[weight + format.suffixes[0]].clone()
    numbers.view(torch.uint8).view(-1)[0] ^= 1
    asyncio.run(updated(engine, 2, [(weight + format.suffixes[0], numbers)], base=1))
    expected = dequantised(numbers, dict(sent)[weight + format.suffixes[1]], format)
    assert torch.equal(engine._held[weight], expected)
    left_out = f"{weight}{format.suffixes[1]}"
    with pytest.raises(EngineError, match=f"nobody sent {weight}"):
        asyncio.run(updated(engine, 3, [pair for pair in sent if pair[0] != left_out]))


def test_a_folder_of_another_model_or_in_an_unknown_format_is_refused(wide: Path, tmp_path: Path) -> None:
    import json

    build_folder("mixtral", tmp_path / "narrow")
    with pytest.raises(EngineError, match="an engine takes only weights of the model that it was started with"):
        EmbeddedEngine(wide, served_path=tmp_path / "narrow")
    exported(wide.parent / "dist", tmp_path / "few", dtype="mxfp8")
    file = tmp_path / "few" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(EngineError, match=r"the engine's config\.json: quantization_config says .*'awq'"):
        EmbeddedEngine(wide, served_path=tmp_path / "few")


def test_a_weight_is_given_when_its_scales_have_come_and_others_as_they_are() -> None:
    taken: Any = Dequantiser(FORMATS["mxfp8"], {"x.weight"}.__contains__)
    rows = torch.randn(2, 32)
    from megarl.options.few_bits.mxfp8 import dequantise_rows, quantise_rows

    values, scales = quantise_rows(rows)
    assert taken.take("x.weight_scale_inv", scales) is None
    name, found = taken.take("x.weight", values)
    assert name == "x.weight"
    assert torch.equal(found, dequantise_rows(values, scales))
    assert taken.take("norm.weight", rows[0])[1] is rows[0] or torch.equal(taken.take("norm.weight", rows[0])[1], rows[0])
