"""PEFT has adapters where the weight map of a family says, under these names and in these shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.models.adapters import LORA_A, LORA_B
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import architecture_for
from tests.families import FAMILIES, build_folder, hugging_face
from tests.options.lora import adapters


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_has_the_adapters_that_the_map_names(family: str, tmp_path: Path) -> None:
    build_folder(family, tmp_path / family)
    made = adapters.with_adapters(hugging_face(family), tmp_path / family)
    config = HFFolder(tmp_path / family).config
    architecture = architecture_for(config)
    named = adapters.LORA.with_adapters(architecture.weight_map(config), architecture.rows_together(config)).hf_shapes()
    expected = {name: shape for name, shape in named.items() if name.endswith((LORA_A, LORA_B))}
    assert {name: tuple(tensor.shape) for name, tensor in adapters.tensors(made).items()} == expected
