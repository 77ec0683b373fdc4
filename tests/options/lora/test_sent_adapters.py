"""`policy.lora.sync: adapters`: engines that cannot add them, or not exactly, are named in one sentence."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.rollout.engines.registry import check_engine
from tests.config import smallest
from tests.families import build_folder
from tests.rollout.test_sglang_experts import served as served_experts
from tests.rollout.test_sglang_families import served

config = partial(smallest.config, model={"path": "nowhere", "dtype": "float32"}, policy={"lora": {"rank": 4}})


def test_what_may_be_chosen() -> None:
    assert config().sends_adapters
    assert config("rollout.engine=embedded").sends_adapters
    assert not config("policy.lora.rank=0").sends_adapters
    assert not config("policy.lora.sync=merged", "rollout.delta_every=3").sends_adapters
    assert not config("rollout.engine=replay", "rollout.replay_from=x").sends_adapters
    assert config().other_weights is None
    assert config("policy.lora={adapter: x}").other_weights == "policy.lora.adapter"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("rollout.weight_transport=folder", "rollout.servers.urls=['http://a']"),
            r"policy\.lora\.sync is 'adapters', which is not what engines of rollout\.engine = 'sglang' take, whose weights "
            r"are a folder; it must be 'merged'",
        ),
        (
            ("rollout.servers.model_path=other",),
            r"policy\.lora\.sync is 'adapters', which are added to the weights of model\.path, and rollout\.servers"
            r"\.model_path is other; it must be 'merged'",
        ),
        (
            ("rollout.delta_every=2",),
            r"rollout\.delta_every is 2, which tells what has changed of weights, and policy\.lora\.sync is 'adapters'; it "
            "must be 0",
        ),
    ],
)
def test_what_contradicts_is_said_without_a_model(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("qwen3", ("rollout.engine_args={max_lora_rank: 2}",), r"engine_args\.max_lora_rank is set by policy\.lora; remove it"),
        ("qwen3", ("rollout.engine_args={enable_lora: false}",), r"engine_args\.enable_lora is set by policy\.lora; remove it"),
        (
            "qwen3",
            ("rollout.engine_args={lora_backend: csgmv}",),
            "lora_backend is 'csgmv', which needs a GPU; it must be",
        ),
        (
            "qwen3",
            ("rollout.engine_args={lora_use_virtual_experts: true}",),
            r"sync is 'adapters', which SGLang's servers do not do with rollout\.engine_args\.lora_use_virtual_experts = true, "
            "which is of adapters of experts; it may be 'merged'",
        ),
        ("deepseek_v3-moonlight", (), r"with a model of the family 'deepseek_v3' \(they .*\); it may be 'merged'"),
        ("olmo2", (), r"with a model of the family 'olmo2' \(they .*\); it may be 'merged'"),
        ("qwen3_moe", (), r"with adapters of 'model\.layers\.0\.mlp.*' \(policy\.lora\.targets; .*\); it may be 'merged'"),
    ],
)
def test_adapters_that_sglang_would_not_add_are_refused(
    family: str, overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    folder = (served_experts if family == "qwen3_moe" else served)(family, tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        check_engine(config(f"model.path={folder}", *overrides), "cpu")
    if not overrides:
        check_engine(config(f"model.path={folder}", "policy.lora.sync=merged"), "cpu")


def test_adapters_of_attention_alone_are_served_beside_experts(tmp_path: Path) -> None:
    folder = served_experts("qwen3_moe", tmp_path / "model")
    check_engine(config(f"model.path={folder}", "policy.lora.targets=[q_proj, k_proj, o_proj]"), "cpu")


def test_a_tied_output_layer_with_an_adapter_is_not_sent_merged(tmp_path: Path) -> None:
    chosen = "policy.lora.targets=[all-linear, lm_head]"
    for family in ("qwen2", "llama"):
        build_folder(family, tmp_path / family)
    tied, untied = (f"model.path={tmp_path / family}" for family in ("qwen2", "llama"))
    merged = ("policy.lora.sync=merged", "rollout.engine=embedded")
    with pytest.raises(
        ConfigError, match=r"sync is 'merged', but .* shares its weight with the embedding, .* without 'lm_head'"
    ):
        check_engine(config(tied, chosen, *merged), "cpu")
    check_engine(config(tied, *merged), "cpu")
    check_engine(config(untied, chosen, *merged), "cpu")
    check_engine(config(tied, chosen, "rollout.engine=embedded"), "cpu")


def test_the_embedded_engine_takes_adapters_of_any_family(tmp_path: Path) -> None:
    build_folder("deepseek_v3", tmp_path / "model")
    check_engine(config(f"model.path={tmp_path / 'model'}", "rollout.engine=embedded"), "cpu")
