"""Models that see through conversion: every byte back, megatron-core's own keys, and a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.convert.plan import plan_hf
from megarl.convert.run import run_plan
from megarl.convert.sources import open_hf
from megarl.convert.verify import compare, open_any
from megarl.errors import CheckpointError, LayoutError, ModelError
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.option_list import OPTIONS
from tests.convert.conftest import assert_same_tensors, exported, imported, resharded, tensors
from tests.convert.test_megatron_core import described, load_over_garbage, save_with_megatron_core
from tests.seeing import SEEING, build_seeing_folder, hugging_face
from tests.world import World

DENSE = [Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(tp=2, pp=2, first_stage_layers=3)]
EXPERTS = [Layout(), Layout(tp=2, dp=2, ep=4, sequence_parallel=True), Layout(pp=2, dp=2, ep=2), Layout(tp=2, etp=2, pp=2)]


def layouts(family: str) -> list[Layout]:
    return EXPERTS if SEEING[family].num_experts else DENSE


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family that sees, built once."""
    root = tmp_path_factory.mktemp("seeing")

    def folder(family: str) -> Path:
        if not (root / family).exists():
            build_seeing_folder(family, root / family)
        return root / family

    return folder


@pytest.mark.parametrize("family", SEEING)
def test_every_layout_gives_every_byte_back_also_by_way_of_another(
    seeing: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder, before = seeing(family), None
    for number, layout in enumerate(layouts(family)):
        checkpoint, back = tmp_path / f"dist{number}", tmp_path / f"hf{number}"
        imported(folder, checkpoint, layout)
        exported(checkpoint, back, max_shard_bytes=20_000)
        assert_same_tensors(back, folder)
        tally = compare(open_any(folder), open_any(checkpoint))
        assert (tally.differences, tally.tensors) == ([], len(HFFolder(folder).names))
        assert (back / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()
        assert json.loads((back / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
        if before is not None:
            resharded(before, tmp_path / f"resharded{number}", layout)
            for file in checkpoint.glob("*.distcp"):
                assert (tmp_path / f"resharded{number}" / file.name).read_bytes() == file.read_bytes(), file.name
        before = checkpoint
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "hf0")
    expected = dict(hugging_face(family).named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("family", SEEING)
def test_an_import_is_what_megatron_core_writes_and_loads_into_other_layouts(
    world: World, seeing: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder, layout = seeing(family), layouts(family)[2]
    imported(folder, tmp_path / "ours", layout)
    world.call(save_with_megatron_core, str(folder), layout, str(tmp_path / "theirs"), "log_probs", size=layout.world_size)
    keys, objects = described(tmp_path / "ours")
    expected_tensors, expected_objects = described(tmp_path / "theirs")
    assert {key: keys[key] for key in expected_tensors} == expected_tensors
    assert objects >= {name for name in expected_objects if not name.startswith("common_state/")}
    assert not [name for name in objects if name.startswith("visual.")]
    for other in layouts(family)[1:3]:
        answers = world.call(load_over_garbage, str(folder), other, str(tmp_path / "ours"), "reference", size=other.world_size)
        assert all(answers)
    exported(tmp_path / "theirs", tmp_path / "back", hf_config_from=folder)
    assert_same_tensors(tmp_path / "back", folder)


def test_a_tower_that_the_config_does_not_have_is_refused(seeing: Callable[[str], Path], tmp_path: Path) -> None:
    imported(seeing("qwen2_vl"), tmp_path / "dist", Layout())
    text = tmp_path / "text"
    text.mkdir()
    config = json.loads((seeing("qwen2_vl") / "config.json").read_text())
    of_text = config["text_config"] | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    of_text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (text / "config.json").write_text(json.dumps(of_text))
    with pytest.raises(CheckpointError, match=r"'visual\..*' in '.*dist' has no place in the model that"):
        exported(tmp_path / "dist", tmp_path / "hf", hf_config_from=text)


def test_a_layout_that_deepstack_does_not_fit_is_refused(seeing: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="pp is 4, which leaves 1 of the layers to the first model chunk"):
        imported(seeing("qwen3_vl"), tmp_path / "dist", Layout(pp=4))


def test_layers_for_multi_token_prediction_behind_a_decoder_that_sees_are_left_out(
    seeing: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = HFFolder(seeing("glm4v_moe"))
    config = folder.config | {"text_config": folder.config["text_config"] | {"num_nextn_predict_layers": 1}}
    extra = {"model.language_model.layers.4.eh_proj.weight": torch.zeros(32, 64)}
    write_hf_folder(tmp_path / "with", (tensors(folder.path) | extra).items(), config)
    imported(tmp_path / "with", tmp_path / "dist", Layout(pp=2))
    exported(tmp_path / "dist", tmp_path / "without")
    assert_same_tensors(tmp_path / "without", folder.path)
    assert json.loads((tmp_path / "without" / "config.json").read_text()) == folder.config
    run_plan(plan_hf("cast", open_hf(tmp_path / "with"), "bf16"), tmp_path / "cast")
    assert HFFolder(tmp_path / "cast").config["text_config"]["num_nextn_predict_layers"] == 0


def test_experts_that_are_stored_together_in_small_blocks_in_other_dtypes_and_as_transformers_writes_them(
    seeing: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.convert.blocks.BLOCK_BYTES", 200)
    folder, layout = seeing("qwen3_vl_moe"), Layout(pp=2, dp=2, ep=2)
    imported(folder, tmp_path / "dist", layout, dtype="bf16")
    exported(tmp_path / "dist", tmp_path / "bf16", max_shard_bytes=20_000)
    halves = {name: tensor.bfloat16() for name, tensor in tensors(folder).items()}
    assert tensors(tmp_path / "bf16").keys() == halves.keys()
    assert all(torch.equal(tensor, halves[name]) for name, tensor in tensors(tmp_path / "bf16").items())
    assert sorted(HFFolder(tmp_path / "bf16").entries()) == sorted(HFFolder(folder).entries())
    hugging_face("qwen3_vl_moe").save_pretrained(tmp_path / "saved")
    imported(tmp_path / "saved", tmp_path / "again", layout)
    imported(folder, tmp_path / "plain", layout)
    for file in (tmp_path / "plain").glob("*.distcp"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    run_plan(plan_hf("cast", open_hf(tmp_path / "saved"), "bf16"), tmp_path / "cast")
    assert all(torch.equal(tensor, halves[name]) for name, tensor in tensors(tmp_path / "cast").items())
    assert compare(open_any(folder), open_any(tmp_path / "again")).differences == []
    [difference] = compare(open_any(folder), open_any(broken(folder, tmp_path / "broken"))).differences
    assert difference.startswith("'model.language_model.layers.2.mlp.experts.3.up_proj.weight' has other values")


def broken(folder: Path, target: Path) -> Path:
    """The folder with one value of one expert's up projection changed."""
    changed = tensors(folder)
    changed["model.language_model.layers.2.mlp.experts.3.up_proj.weight"][0, 0] += 1
    write_hf_folder(target, changed.items(), HFFolder(folder).config)
    return target


@pytest.mark.skipif("few_bits" not in OPTIONS, reason="needs the option few_bits")
def test_experts_that_are_stored_together_are_not_written_in_fp8(seeing: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"of family .qwen3_vl_moe. cannot be stored as fp8-block: it has a vision tower"):
        plan_hf("cast", open_hf(seeing("qwen3_vl_moe")), "fp8-block")
