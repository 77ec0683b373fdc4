"""MXFP8 and INT4 folders: written as the whole tensors are stored, read back as what these stand for, checked and continued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.config.layout import Layout
from megarl.convert.plan import plan_dist
from megarl.convert.sources import open_hf
from megarl.convert.verify import check_record, compare, open_any
from megarl.errors import ModelError
from megarl.models.hf_folder import HFFolder
from megarl.models.weight_formats import stored_format
from megarl.options.few_bits.formats import FORMATS
from megarl.options.few_bits.tensors import dequantised
from tests.convert.conftest import exported, imported, tensors
from tests.options.few_bits.test_formats import stored
from tests.options.few_bits.test_fp8_export import wide_folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Mixtral whose sizes are multiples of 128, and its distributed checkpoint beside it."""
    folder = wide_folder("Mixtral", tmp_path_factory.mktemp("wide") / "hf")
    imported(folder, folder.parent / "dist", Layout(tp=2, etp=2, sequence_parallel=True))
    return folder


@pytest.mark.parametrize("dtype", ["mxfp8", "int4-32", "int4-128"])
def test_an_export_writes_what_the_whole_tensors_are_stored_as(mixtral: Path, tmp_path: Path, dtype: str) -> None:
    format = FORMATS[dtype]
    exported(mixtral.parent / "dist", tmp_path / "few", dtype=dtype, max_shard_bytes=2**20)
    found, expected = tensors(tmp_path / "few"), stored(mixtral, format)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    assert stored_format(HFFolder(tmp_path / "few").config) == format
    assert check_record(open_any(tmp_path / "few")).differences == []

    imported(tmp_path / "few", tmp_path / "again", Layout(tp=4, pp=2, etp=4, sequence_parallel=True))
    exported(tmp_path / "again", tmp_path / "back")
    back = tensors(tmp_path / "back")
    assert back.keys() == tensors(mixtral).keys()
    for name, value in back.items():
        wanted = expected.get(name)
        if f"{name}{format.suffixes[1]}" in expected:
            values, scales = expected[name + format.suffixes[0]], expected[name + format.suffixes[1]]
            wanted = dequantised(values, scales, format).bfloat16()
        assert wanted is not None
        assert value.dtype == torch.bfloat16, name
        assert torch.equal(value, wanted), name
    assert compare(open_any(tmp_path / "few"), open_any(tmp_path / "back")).differences == []
    assert "quantization_config" not in HFFolder(tmp_path / "back").config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", r"has no tensor '.*w1\.weight_shape', which config\.json implies \(int4\)"),
        (
            "scale",
            r"w1\.weight_scale' .* is torch\.float32 .*, but int4 of a weight of \[256, 256\] needs torch\.bfloat16 \[256, 8\]",
        ),
        ("group", r"w1\.weight_scale' .* is torch\.bfloat16 \[256, 8\], but int4 .* needs torch\.bfloat16 \[256, 4\]"),
    ],
)
def test_int4_folders_that_contradict_their_config_are_named(mixtral: Path, tmp_path: Path, change: str, message: str) -> None:
    exported(mixtral.parent / "dist", tmp_path / "few", dtype="int4-32")
    found = tensors(tmp_path / "few")
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    if change == "shape":
        found.pop(f"{name}_shape")
    elif change == "scale":
        found[f"{name}_scale"] = found[f"{name}_scale"].float()
    else:
        file = tmp_path / "few" / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
        file.write_text(json.dumps(config))
    save_file(found, tmp_path / "few" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        open_hf(tmp_path / "few")


def test_a_plan_from_config_json_alone_writes_the_same_files(mixtral: Path, tmp_path: Path) -> None:
    exported(mixtral.parent / "dist", tmp_path / "few", dtype="int4-32")
    plans = [plan_dist("import", open_hf(tmp_path / "few", config_only=alone), Layout(pp=2), None)
             for alone in (False, True)]  # fmt: skip
    assert plans[0].files == plans[1].files
    assert plans[0].bytes_read == plans[1].bytes_read
