"""MXFP4 experts of gpt-oss: read as transformers reads them, and written as bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.errors import ModelError
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import architecture_for
from megarl.options.few_bits.mxfp4 import Mxfp4Tensor, dequantised
from tests.models.megatron_models import load_and_write
from tests.world import World

EXPERTS, ROWS, COLUMNS = 3, 10, 64


class Whole:
    """A tensor as a safetensors slice."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.tensor[key]


def packed(experts: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks, and scales of all sizes that bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    scales.view(-1)[:3] = torch.tensor([0, 1, 254], dtype=torch.uint8)
    return blocks, scales


def test_mxfp4_is_dequantised_as_transformers_does_bit_for_bit() -> None:
    blocks, scales = packed(EXPERTS, ROWS, COLUMNS, seed=1)
    expected = convert_moe_packed_tensors(blocks, scales)
    found = Mxfp4Tensor(Whole(blocks), Whole(scales), "x")
    assert tuple(found.get_shape()) == tuple(expected.shape) == (EXPERTS, COLUMNS, ROWS)
    every = slice(None)
    for expert in range(EXPERTS):
        assert torch.equal(found[expert, every, every].view(torch.int16), expected[expert].view(torch.int16))
        assert torch.equal(found[expert, slice(5, 40), slice(2, 9)], expected[expert, 5:40, 2:9])
    one_of_each = torch.tensor([[[n | (15 - n) << 4 for n in range(16)]]], dtype=torch.uint8)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    low = dequantised(one_of_each, torch.tensor([[128]], dtype=torch.uint8)).flatten()[::2]
    assert low.tolist() == [2 * value for value in values] + [-2 * value for value in values]


def test_blocks_and_scales_that_do_not_belong_together_are_refused() -> None:
    blocks, scales = packed(EXPERTS, ROWS, COLUMNS, seed=1)
    with pytest.raises(ModelError, match=r"'x_scales' \[3, 9, 2\]; they must be"):
        Mxfp4Tensor(Whole(blocks), Whole(scales[:, :9]), "x")


def mxfp4_folder(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A tiny gpt-oss as the hub has it; its config, and by hub name the bfloat16 values that transformers makes of it."""
    hidden, ffn, experts, heads = 32, 64, 4, 4
    config = transformers.GptOssConfig(
        vocab_size=61, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=2, head_dim=12, num_local_experts=experts, num_experts_per_tok=2, max_position_embeddings=256,
        sliding_window=8,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).bfloat16()
    generator = torch.Generator().manual_seed(4)
    stored = {}
    for name, value in model.state_dict().items():
        stored[name] = (0.1 * torch.randn(value.shape, generator=generator)).to(torch.bfloat16)
    expected = dict(stored)
    for layer in range(2):
        for part, (rows, columns) in {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}.items():
            name = f"model.layers.{layer}.mlp.experts.{part}"
            blocks, scales = packed(experts, rows, columns, seed=layer)
            expected[name] = convert_moe_packed_tensors(blocks, scales)
            del stored[name]
            stored |= {name + "_blocks": blocks, name + "_scales": scales}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    said = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16", "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(said))
    return said, expected


def test_an_mxfp4_folder_is_read_and_what_is_written_of_it_is_bfloat16(world: World, tmp_path: Path) -> None:
    config, expected = mxfp4_folder(tmp_path / "mxfp4")
    folder = HFFolder(tmp_path / "mxfp4")
    folder.check(architecture_for(config).weight_map(config))
    block = "model.layers.1.mlp.experts."
    for expert in range(4):
        whole = expected[block + "gate_up_proj"][expert]
        for part, first in (("gate", 0), ("up", 1)):
            rows = whole[:, first::2].T
            found = folder.get_slice(f"{block}{expert}.{part}_proj.weight")
            assert (tuple(found.get_shape()), found[:].dtype) == ((64, 32), torch.bfloat16)
            assert torch.equal(found[:], rows)
            assert torch.equal(found[3:17], rows[3:17])
            assert torch.equal(found[:, 5:9], rows[:, 5:9])
            bias = expected[block + "gate_up_proj_bias"][expert, first::2]
            assert torch.equal(folder.get_slice(f"{block}{expert}.{part}_proj.bias")[:], bias)
            assert torch.equal(folder.get_slice(f"{block}{expert}.{part}_proj.bias")[7:20], bias[7:20])
        assert torch.equal(folder.get_slice(f"{block}{expert}.down_proj.weight")[:], expected[block + "down_proj"][expert].T)
    world.call(load_and_write, str(tmp_path / "mxfp4"), str(tmp_path / "written"), "bfloat16", size=1)
    written = HFFolder(tmp_path / "written")
    assert "quantization_config" not in written.config
    assert set(written.entries()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(written.get_slice(name)[...].view(torch.int16), tensor.view(torch.int16)), name
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.bfloat16)
    assert all(
        torch.equal(value.view(torch.int16), expected[name].view(torch.int16)) for name, value in read.state_dict().items()
    )
