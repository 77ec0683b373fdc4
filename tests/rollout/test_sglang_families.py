"""SGLang on a CPU with the dense families that it has models of its own for, and with Kimi-K2 and Moonlight, after updates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from megarl.errors import EngineError
from megarl.models.deepseek_v3 import READ_BY_SGLANG
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.transformers_names import config_in_transformers
from megarl.option_list import OPTIONS
from megarl.weights.checksums import check_model
from tests.families import FAMILIES, VARIANTS, build_folder, hub_tensors
from tests.families.family import SIZES
from tests.families.positions_and_caps import SCALED_ROPE
from tests.models.test_transformers_names import other_values
from tests.rollout.updates import holds_what_was_sent

WIDTHS: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3}
"""What SGLang need not pad on a CPU."""


READ_BESIDE: dict[str, dict[str, Any]] = {
    "Ministral3": {"original_max_position_embeddings": SCALED_ROPE["original_max_position_embeddings"]},
    "ExaoneMoe": {"is_moe_layer": [False, True, True]},
    "Glm4MoeLite": {"first_k_dense_replace": 1},
}
"""By family, fields that published folders have for SGLang, and transformers does not write."""


def served(family: str, folder: Path) -> Path:
    """A random model of `family` that SGLang serves."""
    entry = VARIANTS[family]
    read = READ_BY_SGLANG if entry.class_prefix == "DeepseekV3" else {}
    of_experts = entry.num_experts and entry.class_prefix != "GptOss"
    widths = WIDTHS if of_experts else {name: size for name, size in WIDTHS.items() if "moe" not in name}
    settings = SIZES | {"pad_token_id": None} | entry.settings | widths | read
    if settings.get("layer_types"):
        kinds, count = settings["layer_types"], settings["num_hidden_layers"]
        settings["layer_types"] = kinds[:count] if "sliding_window_pattern" in settings else kinds[-count:]
    config = getattr(transformers, entry.config_class)(**settings, initializer_range=0.2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(tensor, mean=float(name.endswith("weight") and not entry.norms_less_one), std=0.05)
    written = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    if entry.class_prefix == "Phi3":  # SGLang reads it here, as published folders have it
        written["partial_rotary_factor"] = entry.settings["rope_parameters"]["partial_rotary_factor"]
    written |= READ_BESIDE.get(entry.class_prefix, {})
    if family in ("olmo3-published", "exaone4-published"):
        del written["rope_parameters"]
        written |= {name: entry.settings[name] for name in ("rope_theta", "rope_scaling")}
    written["model_type"] = entry.model_type or written["model_type"]
    write_hf_folder(folder, hub_tensors(model).items(), written)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("olmo2", 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("olmo2", 1), ("gemma3", 2), ("olmo3-published", 1), ("olmo3-published", 2),
                ("phi3-mini", 1), ("gpt_oss", 1), ("gpt_oss", 2),
                ("glm4", 1), ("glm4", 2), ("phi3", 2), ("granite", 1), ("kimi_k2", 1),
                ("deepseek_v3-moonlight", 1), ("ministral3", 1), ("ministral3", 2), ("exaone4-published", 1),
                ("exaone4-published", 2), ("exaone_moe-grouped", 1), ("glm4_moe_lite", 1),
            )
        ),
    ],
)  # fmt: skip
def test_after_an_update_log_probs_are_those_of_transformers_with_these_weights(family: str, tp: int, tmp_path: Path) -> None:
    folder = served(family, tmp_path / "model")
    weights = other_values(folder)
    write_hf_folder(tmp_path / "sent", weights, HFFolder(folder).config)
    config = config_in_transformers(folder)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "sent", config=config, dtype=torch.float32)
    name = next(name for name, _ in weights if name.endswith("layers.1.self_attn.o_proj.weight"))
    asyncio.run(holds_what_was_sent(folder, tmp_path / "log", weights, after, name, tp, tp=tp, start_timeout_s=500))


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("phi3", "must say partial_rotary_factor = 0.5"),
        ("smollm3", "it has no model of this family"),
        ("seed_oss", "it has no model of this family"),
        ("gemma3-untied", "its output layer is the embedding"),
        ("olmo3", "must have rope_theta and rope_scaling"),
        ("llama4", "has not compared its servers"),
        ("step3p5", "has not compared its servers"),
        ("mimo_v2", "has not compared its servers"),
        *([("gemma4", "has not compared its servers")] if "gemma4" in OPTIONS else []),
        *([("longcat_flash", "has not compared its servers")] if "shortcut_experts" in OPTIONS else []),
        ("mistral4", "it has no model of this family"),
        ("exaone_moe", "windows are a token longer"),
        ("exaone4", "must be a string such as 'LLLG'"),
        ("olmo2-tied", "hidden_size / num_attention_heads dimensions"),
    ],
)
def test_a_family_that_sglang_would_serve_wrongly_is_refused(family: str, why: str, tmp_path: Path) -> None:
    build_folder(family, tmp_path / "model")
    with pytest.raises(EngineError, match=f"cannot serve the model.*{why}"):
        check_model(tmp_path / "model", device="cuda")


def test_published_widths_of_the_other_families_are_served(tmp_path: Path) -> None:
    for family in FAMILIES.keys() & {"glm4", "phi3", "granite", "olmo2", "gemma3"}:
        check_model(served(family, tmp_path / family))
