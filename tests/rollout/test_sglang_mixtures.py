"""SGLang on a CPU with MiniMax-M2, ERNIE 4.5 and Hunyuan V1, as their published folders describe them, after updates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from megarl.errors import EngineError
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.weights.checksums import check_model
from tests.families import CHOOSES, VARIANTS, hub_tensors
from tests.families.family import SIZES
from tests.models.test_mixtures import PUBLISHED_HUNYUAN_MOE, PUBLISHED_M2
from tests.models.test_transformers_names import other_values, take_an_update_in_bfloat16
from tests.rollout.updates import holds_what_was_sent

WIDTHS: dict[str, dict[str, Any]] = {
    "minimax_m2": {"intermediate_size": 64},
    "ernie4_5": {"intermediate_size": 64},
    "ernie4_5_moe": {"intermediate_size": 64, "moe_intermediate_size": 64, "moe_norm_min": 1e-12},
    "hunyuan_v1_dense": {"intermediate_size": 64},
    "hunyuan_v1_moe": {"intermediate_size": 64},
}
"""What SGLang need not pad on a CPU, and the only least sum of ERNIE's that it has."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "minimax_m2": PUBLISHED_M2 | {"rotary_dim": 6, "rope_theta": 1e4, "rope_parameters": None},
    "ernie4_5": {"architectures": ["Ernie4_5_ForCausalLM"]},
    "ernie4_5_moe": {},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "hunyuan_v1_moe": PUBLISHED_HUNYUAN_MOE | {"moe_intermediate_size": 64, "num_shared_expert": 1},
}
"""What published folders say and transformers does not read."""


def served(family: str, folder: Path) -> Path:
    """A random model of `family` that SGLang serves."""
    entry = VARIANTS[family]
    settings = SIZES | {"pad_token_id": None} | entry.settings | WIDTHS[family]
    config = getattr(transformers, entry.config_class)(**settings, initializer_range=0.2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith((*CHOOSES, "norm.weight")):
            torch.nn.init.normal_(tensor, mean=float(name.endswith("weight")), std=0.05)
        elif name.endswith(("gate.weight", "wg.weight")):  # which transformers begins with zeros
            torch.nn.init.normal_(tensor, std=0.2)
    written = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"} | PUBLISHED[family]
    write_hf_folder(folder, hub_tensors(model).items(), {name: value for name, value in written.items() if value is not None})
    return folder


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("minimax_m2", 1), ("minimax_m2", 2), ("ernie4_5", 1), ("ernie4_5_moe", 1), ("ernie4_5_moe", 2),
        ("hunyuan_v1_dense", 2), ("hunyuan_v1_moe", 1), ("hunyuan_v1_moe", 2),
    ],
)  # fmt: skip
def test_after_an_update_log_probs_are_those_of_transformers_with_these_weights(family: str, tp: int, tmp_path: Path) -> None:
    folder = served(family, tmp_path / "model")
    weights = other_values(folder)
    write_hf_folder(tmp_path / "sent", weights, HFFolder(folder).config)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "sent", dtype=torch.float32)
    name = next(name for name, _ in weights if name.endswith("layers.1.self_attn.o_proj.weight"))
    asyncio.run(holds_what_was_sent(folder, tmp_path / "log", weights, after, name, tp, tp=tp, start_timeout_s=500))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["minimax_m2", "ernie4_5_moe"])
def test_routers_that_choose_in_float32_beside_bfloat16_are_those_that_were_sent(family: str, tmp_path: Path) -> None:
    take_an_update_in_bfloat16(served(family, tmp_path / "model"), tmp_path / "log")


@pytest.mark.parametrize("family", PUBLISHED)
def test_folders_as_published_are_served(family: str, tmp_path: Path) -> None:
    check_model(served(family, tmp_path / family))


def test_a_width_for_each_layer_is_refused_on_a_cpu(tmp_path: Path) -> None:
    folder = served("hunyuan_v1_moe", tmp_path / "model")
    config = HFFolder(folder).config | {"moe_intermediate_size": [64] * 4}
    (folder / "config.json").write_text(json.dumps(config))
    check_model(folder, device="cuda")
    with pytest.raises(EngineError, match="on a CPU it takes moe_intermediate_size for one number"):
        check_model(folder)
