"""FP8 in blocks: exported as the formula says in float64, read as transformers reads it, imported back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.config.layout import Layout
from megarl.convert.sources import open_hf
from megarl.errors import ModelError
from megarl.models.hf_folder import HFFolder
from megarl.options.few_bits.fp8_blocks import dequantise_rows, quantise_rows
from tests.convert.conftest import exported, imported, tensors

QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Llama whose sizes are multiples of 128 and one whose are not (200, 72), with a block of zeros."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[128:256, 128:] = 0
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 300.0
    folder = tmp_path_factory.mktemp("wide") / "hf"
    model.save_pretrained(folder)
    return folder


def by_formula(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 values, scales of blocks) computed block by block in float64."""
    rows, cols = weight.shape
    scales = torch.ones(-(-rows // 128), -(-cols // 128), dtype=torch.float64)
    values = torch.zeros(rows, cols, dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].double()
            if block.abs().max() > 0:
                scales[i, j] = block.abs().max() / 448
            values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = block / scales[i, j]
    return values, scales


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (200, 72), (1, 300)])
def test_blocks_are_scaled_to_the_largest_float8(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    values, scales = by_formula(weight)
    found, found_scales = quantise_rows(weight)
    assert (found.dtype, found_scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    torch.testing.assert_close(found_scales.double(), scales, rtol=1e-7, atol=0)
    assert float(found.float().abs().max()) == 448.0
    # half a step of three bits of mantissa, or of the smallest float8, for the division in float32 two roundings
    assert bool(((found.double() - values).abs() <= values.abs() * 2**-4 * (1 + 1e-6) + 2**-10).all())
    back = torch.cat([dequantise_rows(found[a:b], found_scales, a) for a, b in ((0, 1), (1, shape[0]))])
    torch.testing.assert_close(back, (found.double() * _spread(found_scales, shape)).float(), rtol=0, atol=0)


def _spread(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return scales.double().repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def test_an_export_quantises_the_linear_layers_alone_and_says_so(wide: Path, tmp_path: Path) -> None:
    imported(wide, tmp_path / "dist", Layout(tp=2, pp=2))
    exported(tmp_path / "dist", tmp_path / "fp8", dtype="fp8-block")
    found, source = tensors(tmp_path / "fp8"), tensors(wide)
    for name, weight in source.items():
        if not name.removesuffix(".weight").endswith(QUANTISED):
            assert found[name].dtype == torch.bfloat16, name
            assert torch.equal(found[name], weight), name
            assert f"{name}_scale_inv" not in found
            continue
        expected, scales = quantise_rows(weight)
        assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8)), name
        assert torch.equal(found[f"{name}_scale_inv"], scales), name
    assert HFFolder(tmp_path / "fp8").config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def test_transformers_and_an_import_read_the_same_values_from_it(wide: Path, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    imported(wide, tmp_path / "dist", Layout(tp=2))
    exported(tmp_path / "dist", tmp_path / "fp8", dtype="fp8-block")
    imported(tmp_path / "fp8", tmp_path / "again", Layout(tp=4, pp=2))
    exported(tmp_path / "again", tmp_path / "back")
    assert "quantization_config" not in HFFolder(tmp_path / "back").config
    stored, back = tensors(tmp_path / "fp8"), tensors(tmp_path / "back")
    assert back.keys() == tensors(wide).keys()
    dequantise: Any = Fp8Dequantize(None)._dequantize_one
    for name, value in back.items():
        expected = stored[name]
        if expected.dtype == torch.float8_e4m3fn:
            expected = dequantise(expected, stored[f"{name}_scale_inv"], torch.float32).to(torch.bfloat16)
        assert value.dtype == torch.bfloat16, name
        assert torch.equal(value, expected), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no scale", r"q_proj\.weight' in '.*' is torch\.float8_e4m3fn, but there is no '.*q_proj\.weight_scale_inv'"),
        (
            "wrong scale",
            r"q_proj\.weight_scale_inv' in '.*' is torch\.float32 \[1, 1\], but fp8-block of .* needs torch\.float32 \[2, 2\]",
        ),
        ("other method", r"quantization_config says .*'awq'.* or of quant_method 'fp8' with"),
    ],
)
def test_quantised_weights_that_cannot_be_read_are_named(wide: Path, tmp_path: Path, change: str, message: str) -> None:
    import json

    imported(wide, tmp_path / "dist", Layout())
    exported(tmp_path / "dist", tmp_path / "fp8", dtype="fp8-block")
    found = tensors(tmp_path / "fp8")
    scale = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    if change == "no scale":
        found.pop(scale)
    elif change == "wrong scale":
        found[scale] = torch.ones(1, 1)
    else:
        config = json.loads((tmp_path / "fp8" / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
        (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    save_file(found, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        open_hf(tmp_path / "fp8")
