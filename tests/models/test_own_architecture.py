"""A family in a file of the user's own is known in the process that is told of it; what cannot be used is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import ModelError
from megarl.models import registry
from megarl.models.registry import architecture_for, use_architecture

OWN = """
from dataclasses import replace
from megarl.models.llama import ARCHITECTURE as LLAMA
MINE = replace(LLAMA, name="mine", hf_classes=("MineForCausalLM",))
SAME = replace(LLAMA, name="other")
NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "_users_own", {})
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def test_an_architecture_of_ones_own_is_known_once_it_is_named(file: Path) -> None:
    config = {"architectures": ["MineForCausalLM"], "model_type": "mine"}
    with pytest.raises(ModelError, match=r"'MineForCausalLM'.*a file that model\.architecture names"):
        architecture_for(config)
    for _ in range(2):  # the second time changes nothing
        use_architecture(f"{file}:MINE")
    assert architecture_for(config).name == "mine"
    assert architecture_for({"model_type": "llama"}).name == "llama"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("SAME", r"which says 'LlamaForCausalLM', as 'llama' does already"),
        ("NUMBER", r"has no architecture 'NUMBER'; it has LLAMA, MINE, SAME"),
        ("MIN", r"has no architecture 'MIN' \(did you mean 'MINE'\?\)"),
    ],
)
def test_what_is_no_architecture_or_is_taken_is_named(file: Path, name: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        use_architecture(f"{file}:{name}")


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.architecture: .*there is no file"):
        use_architecture(f"{file.parent}/mein.py:MINE")
