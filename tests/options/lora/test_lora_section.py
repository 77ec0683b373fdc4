"""Adapters that contradict another field, that the model cannot have, or fields that do nothing without them: one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import parse_config
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError, MegarlError
from megarl.models.check_layouts import check_models
from tests.config.smallest import RL, supervised

LORA = {"policy": {"lora": {"rank": 8}}}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["policy.freeze=[router]"],
            r"policy.freeze is \['router'\], which names weights.*; it must be empty with policy.lora",
        ),
        (
            ["policy.optimizer.name=muon"],
            "policy.optimizer.name is 'muon', which is for whole matrices.*; it must be 'adamw' with",
        ),
        (["policy.optimizer.groups=[{match: ['*norm*']}]"], "policy.optimizer.groups is .*, which chooses among weights"),
        (
            ["policy.mtp.train=true"],
            "policy.mtp.train is true, which trains a layer that has no adapters; it must be false with",
        ),
        (
            ["policy.megatron={moe_shared_expert_overlap: true}", "policy.layout={tp: 2, sequence_parallel: true}"],
            "policy.megatron.moe_shared_expert_overlap is true, which gathers the tokens of shared .*; it must be false with",
        ),
        (["model.int4_experts=32"], "model.int4_experts is 32, which rounds weights .*; it must be 0 with policy.lora"),
        (
            ["model.fp8=hybrid", "model.fp8_param=true"],
            "model.fp8_param is true, which makes weights of the optimizer's copies",
        ),
        (
            ["policy.experts.bias_update_rate=0.001"],
            "bias_update_rate is 0.001, which moves .*; it must be 0 with policy.lora, or",
        ),
        (
            ["reference.reset_every=5"],
            "reference.reset_every is 5, which moves a second model.*; it must be 0 with policy.lora",
        ),
        (
            ["policy.lora.adapter=x"],
            "policy.lora.rank is 8, which the folder in policy.lora.adapter says for itself; it must be left",
        ),
        (
            ["policy.lora.rank=0", "policy.lora.targets=[q_proj]"],
            r"policy.lora.targets = \['q_proj'\] needs adapters.*: set policy",
        ),
        (["policy.lora.rank=0", "policy.lora.exclude=[q_proj]"], r"policy.lora.exclude = \['q_proj'\] needs adapters"),
        (["critic.lora.rank=4", "critic.freeze=[router]"], "critic.freeze is .* with critic.lora"),
        (["policy.lora.rank=-1"], "policy.lora.rank is -1; it must be"),
        (["policy.lora.targets=[]"], "policy.lora.targets is"),
        (["policy.lora.sync=folder"], "policy.lora.sync is 'folder'; it must be 'adapters' or 'merged'"),
        (["critic.lora.sync=merged"], "critic.lora.sync is not a config field"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(apply_overrides(RL | LORA, overrides))


def test_merged_updates_and_supervised_runs_may_move_biases_of_routers() -> None:
    parse_config(apply_overrides(RL | LORA, ["policy.experts.bias_update_rate=0.001", "policy.lora.sync=merged"]))
    supervised("policy.experts.bias_update_rate=0.001", **LORA)
    with pytest.raises(ConfigError, match=r"policy.freeze is"):
        supervised("policy.freeze=[router]", **LORA)


def test_a_reference_of_its_own_is_a_second_model() -> None:
    def shares(*overrides: str) -> bool:
        config = parse_config(apply_overrides(RL | LORA, overrides))
        return config.reference.is_policy_as_it_began(config.policy, config.model.path)

    assert shares()
    assert shares("reference.path=nowhere")
    assert not shares("policy.lora.rank=0")
    assert not shares("reference.path=elsewhere")
    assert not shares("reference.layout.dp=1")


def write_model(path: Path, family: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SIZES | MODELS[family]))
    return path


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "llama",
            ["policy.lora.targets=[q_prj]"],
            r"policy.lora.targets is \['q_prj'\], which names 'q_prj'.*did you mean 'q_proj'",
        ),
        ("llama", ["policy.lora.targets=[lm_hed]"], "which names 'lm_hed', which is no linear layer .*did you mean 'lm_head'"),
        ("llama", ["policy.lora.targets=['lm_*']"], r"names 'lm_\*', which is no linear layer"),
        ("llama", ["policy.lora.targets=[lm_head]", "policy.lora.exclude=['*']"], "which leaves no layer with an adapter"),
        (
            "llama",
            ["critic.lora.rank=4", "critic.lora.targets=[all-linear, lm_head]", "algorithm.advantage=gae"],
            r"critic.lora.targets is .*, which names 'lm_head', in whose place this role has a head of its own; it must be",
        ),
        ("llama", ["policy.lora.exclude=['*']"], "policy.lora.exclude is .*, which leaves no layer with an adapter"),
        (
            "mixtral",
            ["policy.lora.targets=['*.experts.1.*']"],
            "policy.lora.targets is .*, which chooses some of the experts of",
        ),
        ("mixtral", ["policy.lora.targets=[gate]"], "names 'gate', which is no linear layer"),
        ("llama", ["policy.lora={adapter: nowhere}"], "policy.lora.adapter: adapter folder 'nowhere' does not exist"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused_before_anything_starts(
    family: str, overrides: list[str], message: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", family)
    config = parse_config(apply_overrides(RL | LORA, [f"model.path={model}", *overrides]))
    with pytest.raises(MegarlError, match=message):
        check_models(config)


def test_plan_says_the_same_and_ends_with_code_2(tmp_path: Path) -> None:
    model, file = write_model(tmp_path / "model", "llama"), tmp_path / "run.yaml"
    file.write_text(json.dumps(RL | LORA | {"model": {"path": str(model)}}))
    command = [sys.executable, "-m", "megarl", "plan", str(file), "policy.lora.targets=[q_prj]"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "policy.lora.targets is ['q_prj']" in found.stderr
