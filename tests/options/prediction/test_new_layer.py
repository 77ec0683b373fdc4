"""A model is given a layer for multi-token prediction: the rest stays byte for byte, and the layer is its last one again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from megarl.cli.commands import main
from megarl.errors import ModelError
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import architecture_for
from megarl.options.prediction.new_layer import add_layer
from tests.families import build_folder
from tests.predicting import DRAFTED, build_predicting


@pytest.mark.parametrize("family", DRAFTED)
def test_the_new_folder_has_the_model_and_a_copy_of_its_last_layer(tmp_path: Path, family: str) -> None:
    build_folder(family, tmp_path / "plain")
    assert main(["convert", "add-draft", str(tmp_path / "plain"), str(tmp_path / "drafting")]) == 0
    before, after = HFFolder(tmp_path / "plain"), HFFolder(tmp_path / "drafting")
    assert after.config == before.config | {"num_nextn_predict_layers": 1}
    assert {*after.names} == {*architecture_for(after.config).weight_map(after.config).with_prediction().hf_names()}
    for name in after.names:
        source = name if name in before.names else name.replace("model.layers.4.", "model.layers.3.")
        if source in before.names:
            assert torch.equal(after.get_slice(name)[:], before.get_slice(source)[:]), name
    width, states, embedded = 32, torch.randn(5, 32), torch.randn(5, 32)
    projected = torch.cat([embedded, states], dim=1) @ after.get_slice("model.layers.4.eh_proj.weight")[:].T
    assert torch.equal(projected, (embedded + states) / 2)
    assert all(torch.equal(after.get_slice(f"model.layers.4.{n}.weight")[:], torch.ones(width)) for n in ("enorm", "hnorm"))
    norms = [after.get_slice(name)[:] for name in ("model.layers.4.shared_head.norm.weight", "model.norm.weight")]
    assert torch.equal(*norms)

    ids = torch.arange(2, 30)[None]
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)(ids).logits
        for folder in (before, after)
    ]
    assert torch.equal(*logits)


def test_models_that_have_a_layer_or_can_have_none_are_refused(tmp_path: Path) -> None:
    build_predicting("glm4_moe", tmp_path / "has_one")
    with pytest.raises(ModelError, match=r"has a layer for multi-token prediction already; train it with policy\.mtp\.train"):
        add_layer(tmp_path / "has_one", tmp_path / "new")
    for family in ("gpt_oss", "qwen3_next", "qwen2"):  # the last one has windows
        build_folder(family, tmp_path / family)
        with pytest.raises(ModelError, match=f"is of the family {family}, which can have no new layer for multi-token"):
            add_layer(tmp_path / family, tmp_path / "new")
    assert not (tmp_path / "new").exists()
