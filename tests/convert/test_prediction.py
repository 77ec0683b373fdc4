"""The layer for multi-token prediction goes there and back with the rest of a folder, byte for byte, in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.config.layout import Layout
from megarl.convert.plan import plan_hf
from megarl.convert.run import run_plan
from megarl.convert.sources import open_dist, open_hf
from megarl.convert.verify import compare
from megarl.errors import CheckpointError, ModelError
from megarl.models.hf_folder import HFFolder, write_hf_folder
from tests.convert.conftest import assert_same_tensors, exported, imported, resharded, tensors
from tests.families import VARIANTS
from tests.predicting import DRAFTED, VARIANTS_PREDICTING, build_predicting

DENSE = [Layout(), Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2, dp=2)]
EXPERTS = [Layout(), Layout(tp=4, ep=2, etp=2), Layout(tp=2, pp=2, ep=2), Layout(dp=4, ep=4)]


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("predicting")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            build_predicting(family, root / family)
        return root / family

    return folder


@pytest.mark.parametrize("family", [*VARIANTS_PREDICTING, *DRAFTED])
def test_every_layout_gives_every_byte_and_the_config_back(
    predicting: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = predicting(family)
    for number, layout in enumerate(EXPERTS if VARIANTS[family].num_experts else DENSE):
        checkpoint, back = tmp_path / f"dist{number}", tmp_path / f"hf{number}"
        imported(folder, checkpoint, layout)
        exported(checkpoint, back, max_shard_bytes=20_000)
        assert_same_tensors(back, folder)
        assert HFFolder(back).config == HFFolder(folder).config
        assert compare(open_hf(folder), open_dist(checkpoint)).differences == []
        if number:
            resharded(tmp_path / f"dist{number - 1}", tmp_path / f"again{number}", layout)
            for file in checkpoint.glob("*.distcp"):
                assert (tmp_path / f"again{number}" / file.name).read_bytes() == file.read_bytes(), file.name


def test_checkpoints_name_the_layer_as_megatron_core_does(predicting: Callable[[str], Path], tmp_path: Path) -> None:
    imported(predicting("glm4_moe"), tmp_path / "dist", Layout())
    source = open_dist(tmp_path / "dist")
    assert source.dist is not None
    own = {key for key in source.dist.keys if key.startswith("mtp.")}
    assert {f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")} <= own
    assert "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight" in own
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight" in own


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_a_folder_whose_config_has_the_layer_and_whose_weights_have_not_is_converted_without_it(
    predicting: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = predicting(family)
    kept = {name: tensor for name, tensor in tensors(folder).items() if not name.startswith(("mtp.", "model.layers.4."))}
    write_hf_folder(tmp_path / "bare", kept.items(), HFFolder(folder).config)
    imported(tmp_path / "bare", tmp_path / "dist", Layout(pp=2))
    exported(tmp_path / "dist", tmp_path / "back")
    assert_same_tensors(tmp_path / "back", tmp_path / "bare")
    config = HFFolder(tmp_path / "back").config
    assert (config.get("num_nextn_predict_layers") or 0, config.get("mtp_num_hidden_layers") or 0) == (0, 0)


def test_another_dtype_and_fp8_reach_the_layer_too(predicting: Callable[[str], Path], tmp_path: Path) -> None:
    run_plan(plan_hf("cast", open_hf(predicting("glm4_moe")), "bf16"), tmp_path / "cast")
    cast, before = tensors(tmp_path / "cast"), tensors(predicting("glm4_moe"))
    assert cast.keys() == before.keys()
    for name, tensor in before.items():
        wanted = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        assert cast[name].dtype == wanted.dtype, name
        assert torch.equal(cast[name], wanted), name


def test_tensors_that_are_missing_damaged_or_differ_from_what_they_copy_are_named(
    predicting: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = HFFolder(predicting("deepseek_v3"))
    whole = tensors(folder.path)

    def opened(name: str, changed: dict[str, torch.Tensor]) -> None:
        write_hf_folder(tmp_path / name, changed.items(), folder.config)
        open_hf(tmp_path / name)

    lacking = {name: tensor for name, tensor in whole.items() if name != "model.layers.4.eh_proj.weight"}
    with pytest.raises(ModelError, match=r"no tensor 'model.layers.4.eh_proj.weight'"):
        opened("lacking", lacking)
    with pytest.raises(ModelError, match=r"'model.layers.4.eh_proj.weight'.* has shape \[32, 32\], .* implies \[32, 64\]"):
        opened("narrow", whole | {"model.layers.4.eh_proj.weight": torch.zeros(32, 32)})
    copied = "model.layers.4.shared_head.head.weight"
    with pytest.raises(ModelError, match=r"'model.layers.4.shared_head.head.weight' in .* differs from 'lm_head.weight'"):
        opened("other", whole | {copied: whole[copied] + 1})
    without = {name: tensor for name, tensor in whole.items() if name != copied}
    opened("shared", without)  # a folder need not store it twice


def test_a_checkpoint_with_the_layer_needs_a_config_that_knows_it(predicting: Callable[[str], Path], tmp_path: Path) -> None:
    imported(predicting("deepseek_v3"), tmp_path / "dist", Layout())
    config = HFFolder(predicting("deepseek_v3")).config | {"num_nextn_predict_layers": 0}
    (tmp_path / "dist" / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'mtp\.layers\.0\..*' in .* has no place in the model that"):
        open_dist(tmp_path / "dist")
