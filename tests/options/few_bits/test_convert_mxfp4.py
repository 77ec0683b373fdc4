"""gpt-oss's folders with MXFP4 experts are converted as the bfloat16 that transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.layout import Layout
from megarl.convert.sources import open_hf
from megarl.convert.verify import compare
from megarl.errors import ModelError
from megarl.models.hf_folder import HFFolder
from tests.convert.conftest import exported, imported
from tests.options.few_bits.test_mxfp4 import mxfp4_folder


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, ep=2, pp=2, dp=2, sequence_parallel=True)], ids=["one", "tp2 ep2 pp2"]
)
def test_every_expert_comes_out_as_transformers_reads_it(tmp_path: Path, layout: Layout) -> None:
    _, expected = mxfp4_folder(tmp_path / "mxfp4")
    imported(tmp_path / "mxfp4", tmp_path / "dist", layout)
    exported(tmp_path / "dist", tmp_path / "hf", max_shard_bytes=50_000)
    written = HFFolder(tmp_path / "hf")
    assert set(written.entries()) == set(expected)
    for name, tensor in expected.items():
        found = written.get_slice(name)[...]
        assert (found.dtype, found.shape) == (torch.bfloat16, tensor.shape), name
        assert torch.equal(found.view(torch.int16), tensor.view(torch.int16)), name
    assert "quantization_config" not in written.config
    tally = compare(open_hf(tmp_path / "mxfp4"), open_hf(tmp_path / "hf"))
    assert (tally.differences, tally.tensors) == ([], 2 * (4 * 6 + 13) + 3)


def test_what_is_no_mxfp4_of_this_family_is_refused(tmp_path: Path) -> None:
    mxfp4_folder(tmp_path / "mxfp4")
    file = tmp_path / "mxfp4" / "model.safetensors"
    name = "model.layers.1.mlp.experts.down_proj_scales"
    stored = load_file(file)
    save_file(stored | {name: stored[name][:, :-1].contiguous()}, file)
    with pytest.raises(ModelError, match=r"down_proj_blocks' has shape .* and .*_scales'"):
        open_hf(tmp_path / "mxfp4")
    save_file({key: value for key, value in stored.items() if key != name}, file)
    with pytest.raises(ModelError, match=rf"no tensor '{name}'"):
        open_hf(tmp_path / "mxfp4")
