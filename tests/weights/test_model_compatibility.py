"""An engine that serves another model than the trainer's is refused in one sentence, before anything is sent to it."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.errors import EngineError
from megarl.weights.model_compatibility import ServedModel, check_same_model
from tests.rollout.tiny import TINY

CONFIG = TINY.to_dict() | {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("changed", "dtype", "message"),
    [
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            "float32",
            "has architecture Qwen2ForCausalLM, the trainer's LlamaForCausalLM",
        ),
        ({}, "bfloat16", "has dtype bfloat16, the trainer's float32"),
        ({"vocab_size": 640}, "float32", "has a vocabulary of 640, the trainer's 512"),
        ({"tie_word_embeddings": False}, "float32", r"has lm_head\.weight of shape \[512, 64\], the trainer's not at all"),
        ({"num_hidden_layers": 1}, "float32", r"has model\.layers\.1\..* not at all, the trainer's of shape \[64\]"),
        (
            {"intermediate_size": 96},
            "float32",
            r"has model\.layers\.0\.mlp\.down_proj\.weight of shape \[64, 96\], the trainer's .*128\]",
        ),
    ],
)
def test_the_first_difference_is_named(changed: dict[str, Any], dtype: str, message: str) -> None:
    with pytest.raises(EngineError, match=f"the engine's model {message}.*: an engine takes only weights of the model that"):
        check_same_model(ServedModel(CONFIG | changed, dtype), ServedModel(CONFIG, "float32"))


def test_another_folder_of_the_same_model_is_fine() -> None:
    check_same_model(ServedModel(CONFIG | {"_name_or_path": "elsewhere"}, "float32"), ServedModel(CONFIG, "float32"))
