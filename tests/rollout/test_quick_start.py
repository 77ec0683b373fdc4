"""What a CPU server skips when it starts: the files of models that it does not serve, and no others."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from megarl.rollout.engines.sglang.on_cpu.quick_start import import_models_of

NAME = "SGLANG_DISABLED_MODEL_ARCHS"
sglang = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(sglang is None, reason="needs SGLang")


def skipped(folder: Path, monkeypatch: pytest.MonkeyPatch, **config: object) -> set[str]:
    monkeypatch.setattr(os, "environ", {})  # other tests of this process start servers
    (folder / "config.json").write_text(json.dumps(config))
    import_models_of(str(folder))
    return set(os.environ.get(NAME, "").split(",")) - {""}


@pytest.mark.parametrize(
    ("architecture", "file"),
    [
        ("LlamaForCausalLM", "llama"),
        ("MistralForCausalLM", "mistral"),
        ("Phi3ForCausalLM", "llama"),
        ("Qwen2ForCausalLM", "qwen2"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("MixtralForCausalLM", "mixtral"),
        ("DeepseekV3ForCausalLM", "deepseek_v2"),
    ],
)
def test_all_but_the_served_models_file_is_skipped(
    architecture: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = skipped(tmp_path, monkeypatch, architectures=[architecture])
    assert sglang is not None
    assert sglang.submodule_search_locations is not None
    there = {path.stem for path in (Path(sglang.submodule_search_locations[0]) / "srt" / "models").glob("*.py")}
    assert there - names == {file}


@pytest.mark.parametrize("config", [{"architectures": ["NobodysForCausalLM"]}, {"architectures": None}, {}])
def test_nothing_is_skipped_where_no_file_defines_the_model(
    config: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert skipped(tmp_path, monkeypatch, **config) == set()


def test_what_the_user_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setenv(NAME, "qwen2")
    import_models_of(str(tmp_path))
    assert os.environ[NAME] == "qwen2"
