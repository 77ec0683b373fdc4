"""Adapters merged into a folder: every weight is what peft makes of it, and what was not adapted is byte-equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.cli import main
from megarl.errors import ModelError
from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for
from megarl.options.lora.merge import merge_adapters
from megarl.options.lora.peft_folder import write_peft_folder
from megarl.options.lora.peft_header import SCORE
from megarl.options.lora.weight_map import Lora
from tests.families import FAMILIES, build_folder, hub_tensors, hugging_face

DENSE = [name for name, family in FAMILIES.items() if family.num_experts is None]


def write_adapters(
    path: Path, hf_config: dict[str, Any], lora: Lora, more: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Random adapters of a model, in a PEFT folder."""
    family = architecture_for(hf_config)
    weight_map = family.weight_map(hf_config)
    adapted = lora.with_adapters(weight_map, family.rows_together(hf_config)).hf_shapes()
    generator = torch.Generator().manual_seed(11)
    new = [name for name in adapted if name.endswith((LORA_A, LORA_B))]
    tensors = {name: torch.randn(adapted[name], generator=generator) for name in new} | (more or {})
    write_peft_folder(path, tensors.items(), lora, base="base", hf_config=hf_config)
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_is_the_dense_formula_rounded_once_and_all_else_is_byte_equal(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    build_folder(family, tmp_path / "float32")
    whole = HFFolder(tmp_path / "float32")
    write_hf_folder(tmp_path / "base", ((name, whole.get_slice(name)[:].to(dtype)) for name in whole.names), whole.config)
    base, lora = HFFolder(tmp_path / "base"), Lora(rank=3, alpha=5.0, rslora=True)
    adapters = write_adapters(tmp_path / "adapter", base.config, lora)
    count = merge_adapters(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged, changed = HFFolder(tmp_path / "merged"), 0
    rows = architecture_for(base.config).rows_together(base.config)
    assert set(merged.names) == set(base.names)
    for name in base.names:
        before, after, layer = base.get_slice(name)[:], merged.get_slice(name)[:], name.removesuffix(".weight")
        assert after.dtype == dtype
        if layer + LORA_B not in adapters:
            assert torch.equal(after, before), name
            continue
        place = rows.place(name) if rows is not None else None
        a = adapters[(place.stored if place is not None else name).removesuffix(".weight") + LORA_A]
        exact = before.double() + lora.scale * adapters[layer + LORA_B].double() @ a.double()
        torch.testing.assert_close(after.double(), exact, rtol=2e-7 if dtype == torch.float32 else 2**-8, atol=1e-6)
        assert not torch.equal(after, before)
        changed += 1
    assert changed >= count > 0
    assert merged.config == base.config


@pytest.mark.parametrize("family", DENSE)
def test_a_merged_folder_is_what_peft_merges_element_by_element(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    build_folder(family, tmp_path / "base")
    config = HFFolder(tmp_path / "base").config
    write_adapters(tmp_path / "adapter", config, Lora(rank=4, alpha=6.0))
    merge_adapters(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    model = peft.PeftModel.from_pretrained(hugging_face(family), tmp_path / "adapter").merge_and_unload()
    write_hf_folder(tmp_path / "peft", hub_tensors(model).items(), config)
    merged, theirs = HFFolder(tmp_path / "merged"), HFFolder(tmp_path / "peft")
    assert set(merged.names) == set(theirs.names)
    for name in merged.names:
        assert torch.equal(merged.get_slice(name)[:], theirs.get_slice(name)[:]), name


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_output_layer_with_an_adapter_has_its_own_weight_in_the_merged_folder(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    build_folder(family, tmp_path / "base")
    config, lora = HFFolder(tmp_path / "base").config, Lora(rank=4, alpha=6.0, targets=("lm_head", "v_proj"))
    tensors = write_adapters(tmp_path / "adapter", config, lora)
    merge_adapters(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged, base = HFFolder(tmp_path / "merged"), HFFolder(tmp_path / "base")
    assert set(merged.names) == {*base.names, "lm_head.weight"}
    assert merged.config == dict(base.config) | {"tie_word_embeddings": False}
    merged.check(architecture_for(merged.config).weight_map(merged.config))
    own = "lm_head.weight" if family == "llama" else "model.embed_tokens.weight"
    product = tensors["lm_head" + LORA_B].double() @ tensors["lm_head" + LORA_A].double() * lora.scale
    exact = base.get_slice(own)[:].double() + product
    torch.testing.assert_close(merged.get_slice("lm_head.weight")[:].double(), exact, rtol=2e-7, atol=1e-6)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(merged.get_slice(embedding)[:], base.get_slice(embedding)[:])
    ids = torch.tensor([[3, 9, 27, 81]])
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(hugging_face(family), tmp_path / "adapter")(ids).logits
        alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4)


def test_a_head_that_travels_with_the_adapters_makes_a_classifier(tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "base")
    score = torch.randn(1, 32)
    write_adapters(tmp_path / "adapter", HFFolder(tmp_path / "base").config, Lora(2, 2.0), {SCORE: score})
    merge_adapters(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = HFFolder(tmp_path / "merged")
    assert merged.config["architectures"] == ["LlamaForSequenceClassification"]
    assert "lm_head.weight" not in merged.names
    assert torch.equal(merged.get_slice(SCORE)[:], score)


def test_the_command_says_what_it_did_and_refuses_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    build_folder("llama", base)
    config = HFFolder(base).config
    write_adapters(adapter, config, Lora(2, 2.0))
    command = ["convert", "merge", "--base", str(base), "--adapter", str(adapter), "--out", str(tmp_path / "merged")]
    assert main(command) == 0
    assert "28 adapters of" in capsys.readouterr().out
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ModelError, match=r"holds quantised weights .quantization_config in config.json., to which nothing"):
        merge_adapters(base, adapter, tmp_path / "new")
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert main([*command[:-1], str(tmp_path / "new")]) == 2
    assert "'model.layers.3.mlp.down_proj' is no linear layer of its decoder" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
