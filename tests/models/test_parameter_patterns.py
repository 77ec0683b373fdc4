"""Patterns of Hugging Face names choose whole parameters or are refused in a sentence; the planner counts what they freeze."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megarl.config.layout import Layout
from megarl.config.load import apply_overrides, parse_supervised_config
from megarl.errors import ConfigError
from megarl.models.check_layouts import check_models
from megarl.models.registry import load_hf_config
from megarl.models.shape import ModelShape
from megarl.planning.parameters import stage_parameters
from tests.families import build_folder

REFUSED: list[tuple[str, str, str | None]] = [
    ("llama", "policy.freeze=[model.layers.0.*, lm_head.*]", None),
    (
        "llama",
        "policy.freeze=['model.layer.0.*']",
        r"policy.freeze is .*, which names 'model.layer.0.\*', a pattern of no tensor of the model",
    ),
    ("llama", "policy.freeze=[router]", "policy.freeze is .*, which names 'router', a pattern of no tensor of the model"),
    ("llama", "policy.freeze=['*']", "policy.freeze is .*, which leaves nothing to train"),
    (
        "llama",
        "policy.freeze=['*.q_proj.*']",
        r"policy.freeze is .*, which names some of model.layers.0.self_attn.q_proj.weight, .*k_proj.weight, .*v_proj.weight, "
        "which Megatron holds as one parameter; it must be patterns of all of them or of none",
    ),
    ("llama", "policy.freeze=['*.q_proj.*', '*.[kv]_proj.*']", None),
    ("llama", "policy.optimizer.groups=[{match: ['lm_head*'], lr_factor: 0.1}]", None),
    (
        "llama",
        "policy.optimizer.groups=[{match: ['head*']}]",
        r"policy.optimizer.groups\[0\].match is \['head\*'\], which names 'head\*', a pattern of no tensor",
    ),
    ("llama", "policy.experts.z_loss_coef=0.1", "policy.experts.z_loss_coef is 0.1, which is for a model with experts"),
    (
        "mixtral",
        "policy.experts.bias_update_rate=0.001",
        "policy.experts.bias_update_rate is 0.001, which moves biases that pick experts, and the routers of this model have",
    ),
    ("mixtral", "policy.experts={balance_coef: 0.1, sequence_balance_coef: 0.1}", None),
    ("glm4_moe", "policy.experts.bias_update_rate=0.001", None),
    ("mixtral", "policy.megatron.moe_aux_loss_coeff=0.1", "megarl has in the role's section experts"),
]


@pytest.mark.parametrize(("family", "field", "sentence"), REFUSED)
def test_choices_are_checked_before_a_run(family: str, field: str, sentence: str | None, tmp_path: Path) -> None:
    build_folder(family, tmp_path / "model")
    base: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": {"source": "jsonl", "path": "x.jsonl"}},
    }
    with pytest.raises(ConfigError, match=sentence) if sentence else nullcontext():
        check_models(parse_supervised_config(apply_overrides(base, [field])))


def test_the_planner_counts_what_patterns_freeze(tmp_path: Path) -> None:
    build_folder("mixtral", tmp_path / "model")
    shape = ModelShape.read(tmp_path / "model")
    load_hf_config(str(tmp_path / "model"))
    sizes = {name: prod(size) for name, size in shape.weight_map.hf_shapes().items()}
    freeze = ("router", "model.layers.0.*", "*.experts.1.*")
    stages = stage_parameters(shape, Layout(pp=2, dp=2, ep=2), freeze=freeze)
    gates = sum(size for name, size in sizes.items() if name.startswith("model.layers.1.") and ".gate." in name)
    rest = sum(size for name, size in sizes.items() if name.startswith("model.layers.0.") and ".experts." not in name)
    assert [stage.frozen_dense for stage in stages] == [gates + rest, 2 * gates]
    expert = sum(size for name, size in sizes.items() if name.startswith("model.layers.0.") and ".experts.0." in name)
    # expert-parallel rank 1 has experts 2 and 3, of which only the first layer's are frozen
    assert [stage.frozen_expert for stage in stages] == [2 * expert, 0]
