"""Which models can train a layer for multi-token prediction, and which of its tensors patterns know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import parse_config, parse_supervised_config
from megarl.errors import ConfigError
from megarl.models.check_layouts import check_models
from megarl.models.hf_folder import write_hf_folder
from megarl.models.registry import architecture_for
from megarl.option_list import OPTIONS
from tests.families import build_folder, hub_tensors, hugging_face
from tests.predicting import DRAFTED, VARIANTS_PREDICTING, all_tensors, build_predicting, config_of

RL: dict[str, Any] = {"data": {"train": {"source": "jsonl", "path": "x"}}, "rewards": [{"name": "exact_number"}]}


def checked(folder: Path, policy: dict[str, Any], **more: Any) -> None:
    check_models(parse_config(RL | {"model": {"path": str(folder)}, "policy": policy} | more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("predicting")

    def get(family: str) -> Path:
        if not (root / family).exists():
            (build_predicting if family in VARIANTS_PREDICTING else build_folder)(family, root / family)
        return root / family

    return get


@pytest.mark.parametrize("family", [*VARIANTS_PREDICTING, *DRAFTED])
def test_the_map_with_the_layer_names_every_tensor_of_the_folder(family: str) -> None:
    weight_map = architecture_for(config_of(family)).weight_map(config_of(family))
    tensors, whole = all_tensors(family), weight_map.with_prediction()
    copies = {copy for copy, _ in whole.copies}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in copies} == whole.hf_shapes()
    assert copies == tensors.keys() - whole.hf_shapes().keys()
    assert weight_map.has_prediction(tensors)
    assert not weight_map.has_prediction(weight_map.hf_names())
    for rule in whole.bound_rules():
        assert whole.rule_for(rule.megatron_name) == rule


@pytest.mark.skipif("prediction" not in OPTIONS, reason="asks for the option prediction")
def test_models_that_cannot_have_the_layer_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    train = {"mtp": {"train": True}}
    checked(folder("qwen3_5"), train)
    with pytest.raises(ConfigError, match=r"policy\.mtp\.train is true, .*one layer for multi-token prediction.*must be false"):
        checked(folder("llama"), train)
    two = config_of("glm4_moe") | {"num_nextn_predict_layers": 2}
    write_hf_folder(tmp_path / "two", hub_tensors(hugging_face("glm4_moe")).items(), two)
    with pytest.raises(ConfigError, match=r"policy\.mtp\.train is true"):
        checked(tmp_path / "two", train)
    rows = {"train": {"source": "jsonl", "path": "x"}}
    tree = {"model": {"path": str(folder("qwen3_5"))}, "policy": train, "objective": {"name": "reward_model"}, "data": rows}
    with pytest.raises(ConfigError, match=r"policy\.mtp\.train is true, .*this policy gives scores"):
        check_models(parse_supervised_config(tree))


@pytest.mark.skipif("prediction" not in OPTIONS, reason="asks for the option prediction")
def test_patterns_know_the_layers_tensors_where_it_is_trained(folder: Callable[[str], Path]) -> None:
    frozen = {"freeze": ["mtp.layers.0.*"]}
    checked(folder("qwen3_5"), frozen | {"mtp": {"train": True}})
    with pytest.raises(ConfigError, match=r"policy\.freeze .*'mtp\.layers\.0\.\*', a pattern of no tensor"):
        checked(folder("qwen3_5"), frozen)
    group = {"optimizer": {"groups": [{"match": ["model.layers.4.eh_proj.*"], "lr_factor": 3.0}]}}
    checked(folder("deepseek_v3"), group | {"mtp": {"train": True}})


@pytest.mark.parametrize("weight", [0, -1.0])
def test_a_loss_that_would_teach_nothing_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"policy\.mtp\.loss_weight"):
        parse_config(RL | {"model": {"path": "x"}, "policy": {"mtp": {"train": True, "loss_weight": weight}}})
