"""The sections `megatron`: names and types are the installed megatron-core's, and what megarl sets itself is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from megarl.config import parse_config
from megarl.config.megatron_fields import megatron_fields
from megarl.config.megatron_options import OWNED, megatron_of
from megarl.config.yaml_tree import apply_overrides
from megarl.errors import ConfigError
from tests.config.smallest import RL
from tests.world import World


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "policy.megatron.apply_rope_fusoin=true",
            ["policy.megatron.apply_rope_fusoin is not a field", "(did you mean 'apply_rope_fusion'?)", "must be left out"],
        ),
        ("critic.megatron.hidden_size=8", ["hidden_size is 8, which megarl takes from the model's config.json"]),
        ("policy.megatron.tensor_model_parallel_size=2", ["is 2, which megarl sets from the role's layout"]),
        ("policy.megatron.params_dtype=float32", ["is 'float32', which megarl sets from model.dtype"]),
        ("policy.megatron.lr=1.0", ["policy.megatron.lr is 1.0, which megarl sets from the role's optimizer"]),
        ("policy.megatron.apply_rope_fusion=1", ["policy.megatron.apply_rope_fusion is 1; it must be true or false"]),
        ("policy.megatron.bucket_size=1.5", ["policy.megatron.bucket_size is 1.5; it must be a whole number or null"]),
        ("policy.megatron.attention_backend=falsh", ["it must be 'flash', 'fused', 'unfused', 'local' or 'auto'"]),
        ("policy.megatron.moe_token_dispatcher_type=x", ["is 'x'; it must be 'allgather', 'alltoall' or 'flex'"]),
        ("policy.megatron.recompute_modules=mlp", ["recompute_modules is 'mlp'; it must be a list of texts or null"]),
        ("policy.megatron.grad_scale_func=f", ["is 'f', which is a field of a type that YAML cannot give"]),
        ("reference.megatron={bucket_size: 5}", ["bucket_size is 5, which only a model that is trained uses"]),
        ("reward_model.megatron.hidden_size=8", ["reward_model.megatron.hidden_size is 8"]),
        ("policy.megatron.overlap_param_gather=true", ["read the weights right after an update"]),
    ],
)
def test_what_a_role_cannot_set_is_one_sentence(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(apply_overrides(RL, [override]))
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"attention_backend": "flash"},
        {"recompute_modules": ["mlp", "layernorm"]},
        {"bucket_size": None, "overlap_grad_reduce": True},
        {"cp_comm_type": "a2a"},
        {"cp_comm_type": ["a2a", "p2p"]},
        {"moe_permute_fusion": False},
    ],
)
def test_fields_of_the_right_type_are_taken(given: dict[str, Any]) -> None:
    config = parse_config({**RL, "policy": {"megatron": given}})
    assert megatron_of(config, "policy") == given


def test_a_reference_without_a_section_is_computed_as_the_policy_is() -> None:
    given = {"apply_rope_fusion": False, "bucket_size": 5}
    config = parse_config({**RL, "policy": {"megatron": given}, "reward_model": {"path": "x", "layout": {}}})
    assert megatron_of(config, "reference") == {"apply_rope_fusion": False}
    assert megatron_of(config, "reward_model") == {}
    config = parse_config({**RL, "policy": {"megatron": given}, "reference": {"megatron": {}}})
    assert megatron_of(config, "reference") == {}


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"policy": {"megatron": {"attention_backend": "flash"}}, "reward_model": {"path": "x"}}, "reward_model"),
        ({"policy": {"megatron": {"attention_backend": "flash"}}, "reference": {"megatron": {}}}, "reference"),
        ({"reference": {"megatron": {"attention_backend": "fused"}}}, "reference"),
    ],
)
def test_models_in_the_same_processes_have_one_attention(sections: dict[str, Any], field: str) -> None:
    """megatron-core writes the choice into the environment, and asserts for the second model that it is its own."""
    with pytest.raises(
        ConfigError, match=rf"{field}\.megatron\.attention_backend is '\w+', which the policy's '\w+' rules out"
    ):
        parse_config({**RL, **sections})
    parse_config({**RL, **sections, field: {**sections.get(field, {}), "layout": {}}})


@pytest.mark.parametrize("name", ["moe_mlp_glu_interleave_size", "use_grouped_gemm_for_dense_mlp", "mla_down_proj_fusion"])
def test_weights_stay_as_megarl_lays_them_out(name: str) -> None:
    """With the first, for example, megatron-core reads an expert's weights as gate and up in alternating rows."""
    with pytest.raises(ConfigError, match="arranges a layer's weights otherwise"):
        parse_config({**RL, "policy": {"megatron": {name: 8}}})


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("needed", ["balance_coef", "bias_update_rate"])
def test_loads_that_something_is_computed_from_leave_no_choice_out(role: str, needed: str) -> None:
    capacity = {"megatron": {"moe_expert_capacity_factor": 1.25}}
    base = RL | {"algorithm": {"name": "ppo"}}
    parse_config(base | {role: {**capacity, "experts": {"sequence_balance_coef": 0.1, "z_loss_coef": 0.1}}})
    with pytest.raises(ConfigError) as caught:
        parse_config(base | {role: {**capacity, "experts": {needed: 0.1}}})
    assert f"{role}.megatron.moe_expert_capacity_factor is 1.25, which drops choices of experts, and " in str(caught.value)
    assert f"{role}.experts.{needed} needs all of them; it must be left out" in str(caught.value)


@pytest.mark.parametrize("field", ["moe_pad_expert_input_to_capacity", "moe_expert_rank_capacity_factor"])
def test_every_token_that_an_expert_gets_or_loses_is_counted(field: str) -> None:
    with pytest.raises(ConfigError, match=f"policy.megatron.{field} is .* behind what megarl counts of their loads"):
        parse_config({**RL, "policy": {"megatron": {"moe_expert_capacity_factor": 1.0, field: True}}})


def test_fields_are_checked_without_torch() -> None:
    check = f"""
import sys
from megarl.config import parse_config
parse_config({RL | {"policy": {"megatron": {"apply_rope_fusion": True}}}!r})
assert "torch" not in sys.modules and "megatron.core" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", check], check=True)


def fields_of_megatron_core(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """By kind, the fields of megatron-core's classes with their defaults where these are plain values."""
    import dataclasses
    import enum

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    def default(field: Any) -> Any:
        value = field.default
        value = value.name if isinstance(value, enum.Enum) else value
        return value if isinstance(value, bool | int | float | str | None) else "no plain value"

    classes = {"model": MLATransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    return {kind: {field.name: default(field) for field in dataclasses.fields(known)} for kind, known in classes.items()}


def test_the_fields_read_from_source_are_those_of_the_imported_classes(world: World) -> None:
    of_classes = world.call(fields_of_megatron_core, size=1)[0]
    fields = megatron_fields()
    for kind, expected in of_classes.items():
        assert {name for name, field in fields.items() if kind in field.kinds} == {n for n in expected if not n.startswith("_")}
    # Every default is of the type that was read, unless megatron-core itself gives None where its annotation does not.
    for name in fields.keys() - OWNED.keys():
        defaults = [of_classes[kind][name] for kind in fields[name].kinds]
        if fields[name].annotation is not None and defaults[0] not in (None, "no plain value"):
            parse_config({**RL, "policy": {"megatron": {name: defaults[0]}}})


@pytest.mark.parametrize(("name", "value"), [("mtp_num_layers", 1), ("mtp_loss_scaling_factor", 0.3)])
def test_multi_token_prediction_is_megarls_own(name: str, value: float) -> None:
    """megatron-core's has its loss in the decoder's forward pass, whose gradients it would reach."""
    with pytest.raises(ConfigError, match=rf"policy\.megatron\.{name} is .*megarl sets from policy\.mtp"):
        parse_config({**RL, "policy": {"megatron": {name: value}}})
