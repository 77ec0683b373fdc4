"""`rollout.disaggregation`: how many engines it stands for, what it does not go with, and what SGLang's servers are given."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, load_config, parse_config
from megarl.errors import ConfigError
from megarl.options.disaggregation import engine as engines
from megarl.options.disaggregation.engine import DisaggregatedEngine
from megarl.options.disaggregation.questions import without_training
from megarl.options.disaggregation.section import disaggregation_of
from megarl.rollout.engines.protocol import EnginePlace
from megarl.rollout.engines.registry import engine_path
from megarl.rollout.engines.sglang.arguments import server_arguments
from megarl.rollout.engines.sglang.engine import SglangEngine

ROOT = Path(__file__).parents[3]
BOTH = {"prefill": 2, "decode": 6}


def config_of(rollout: dict[str, Any], **sections: Any) -> Config:
    """A run of SGLang's engines with this section `rollout`."""
    tree: dict[str, Any] = {
        "model": {"path": "models/tiny-arithmetic", "dtype": "float32"},
        "data": {"train": {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}},
        "rewards": [{"name": "exact_number"}],
        "resources": {"placement": "separate"},
        "rollout": rollout,
    }
    return parse_config(tree | sections)


def test_the_section_says_how_many_engines_there_are() -> None:
    config = config_of({"disaggregation": BOTH, "engines": 8})
    assert config == config_of({"disaggregation": BOTH})
    assert config.rollout.engines == config.rollout.places == 8
    assert engine_path(config.rollout) == "megarl.options.disaggregation.engine:DisaggregatedEngine"
    assert config_of({"disaggregation": {}}).rollout.engines == 2
    alone = without_training(config)
    assert (disaggregation_of(alone.rollout), alone.rollout.engines) == (None, 8)
    assert engine_path(alone.rollout) == engine_path(config_of({}).rollout)


@pytest.mark.parametrize(
    ("rollout", "sections", "message"),
    [
        ({"engines": 3}, {}, "rollout.engines is 3, which contradicts the 2 . 6 engines .*; it must be 8, or left out"),
        (
            {"disaggregation": {"prefill": 0}},
            {},
            "rollout.disaggregation.prefill is 0; it must be a whole number of at least 1",
        ),
        ({"disaggregation": {"decode": "all"}}, {}, "rollout.disaggregation.decode is 'all'; it must be a whole number"),
        ({"disaggregation": {"transport": "tcp"}}, {}, "rollout.disaggregation.transport is 'tcp'; it must be"),
        ({}, {"resources": {"placement": "colocated"}}, "needs engines with devices of their own: set resources.placement"),
        ({"engine": "embedded"}, {}, "rollout.engine = 'embedded' has none; it must be null"),
        (
            {"weight_transport": "folder", "servers": {"urls": [f"http://{n}" for n in range(8)]}},
            {},
            "'sglang' here asks some that run already; it must be null",
        ),
        pytest.param(
            {"schedule": {"mode": "async", "lent_engines": 1}},
            {"algorithm": {"kl": {"coef": 0.0}}},
            "does not go with engines that are lent the trainer's GPUs",
            marks=pytest.mark.needs_option("lending"),
        ),
        pytest.param(
            {"max_engines": 9, "weight_transport": "process_group"},
            {},
            "does not go with engines that come and go",
            marks=pytest.mark.needs_option("elastic_engines"),
        ),
        pytest.param(
            {"speculative": {"algorithm": "ngram"}},
            {},
            "does not go with drafts",
            marks=pytest.mark.needs_option("prediction"),
        ),
        pytest.param(
            {},
            {"policy": {"lora": {"rank": 4, "sync": "adapters"}}},
            "does not go with engines that add adapters themselves",
            marks=pytest.mark.needs_option("lora"),
        ),
        ({"engine_args": {"enable_dp_attention": True, "dp_size": 2}, "tp": 2}, {}, "data parallelism inside an engine"),
        (
            {"engine_args": {"disaggregation_mode": "decode"}},
            {},
            "disaggregation_mode is set by rollout.disaggregation; remove",
        ),
    ],
)
def test_what_it_does_not_go_with_is_one_sentence(rollout: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        config_of({"disaggregation": BOTH} | rollout, **sections)
    assert "\n" not in str(refused.value)


def test_the_mode_is_set_by_nothing_else() -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.disaggregation_transfer_backend is set by rollout\.disaggregation"):
        config_of({"engine_args": {"disaggregation_transfer_backend": "fake"}})


def test_a_machine_that_cannot_move_keys_and_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(SglangEngine, "check", classmethod(lambda cls, config, platform: None))
    by_mooncake = config_of({"disaggregation": BOTH | {"transport": "mooncake"}})
    with pytest.raises(ConfigError, match=r"transport is 'mooncake', which needs GPUs.*; it must be 'nixl'"):
        DisaggregatedEngine.check(by_mooncake, "cpu")
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"'mooncake' needs the Python package mooncake, .*pip install mooncake-transfer-engine"
    ):
        DisaggregatedEngine.check(by_mooncake, "cuda")
    with pytest.raises(ConfigError, match=r"'nixl' needs the Python package nixl, .*pip install 'megarl\[rdma\]'"):
        DisaggregatedEngine.check(config_of({"disaggregation": BOTH}), "cpu")


def test_a_model_that_sees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(SglangEngine, "check", classmethod(lambda cls, config, platform: None))
    monkeypatch.setattr(engines, "sees", lambda path: True)
    with pytest.raises(ConfigError, match="has not been tried with models that see"):
        DisaggregatedEngine.check(config_of({"disaggregation": BOTH}), "cpu")


def sglang_sources(name: str) -> Path:
    """A source file of the installed SGLang."""
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    return Path(package.submodule_search_locations[0], "srt", name)


@pytest.mark.needs_option("host_cache")
def test_the_first_engines_prefill_and_the_others_decode_with_arguments_that_sglang_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    config = config_of({"disaggregation": BOTH, "host_cache_gb": 2, "prompts_per_step": 12, "samples_per_prompt": 4})
    options = [DisaggregatedEngine.options(config, EnginePlace(number, 1, "cpu", tmp_path)) for number in range(8)]
    extras = [of_engine["extra"] for of_engine in options]
    assert [extra["disaggregation_mode"] for extra in extras] == ["prefill"] * 2 + ["decode"] * 6
    assert {extra["disaggregation_transfer_backend"] for extra in extras} == {"nixl"}
    # the cache in main memory is that of prompts, which the first ones compute
    assert [extra.get("hicache_size") for extra in extras] == [2] * 2 + [None] * 6
    names = {name for extra in extras for name in extra} | {engines.PORT, "disaggregation_ib_device"}
    assert names <= server_arguments()
    assert "disaggregation_prefil" not in server_arguments()
    # a step's responses are those of six engines: 2 groups of 4 each
    assert {of_engine["max_running_requests"] for of_engine in options} == {64}
    assert {of_engine["max_total_tokens"] for of_engine in options} == {8 * (config.data.max_prompt_tokens + 256) + 1024}


def test_backends_and_fields_of_requests_are_those_of_sglangs_source() -> None:
    choices = ast.parse(sglang_sources("arg_groups/choices.py").read_text())
    [backends] = [
        ast.literal_eval(node.value)
        for node in choices.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "DISAGG_TRANSFER_BACKEND_CHOICES"
    ]
    assert {*engines.PACKAGES} <= {*backends}
    requests = ast.parse(sglang_sources("managers/io_struct.py").read_text())
    [generate] = [node for node in requests.body if isinstance(node, ast.ClassDef) and node.name == "GenerateReqInput"]
    fields = {getattr(node.target, "id", "") for node in generate.body if isinstance(node, ast.AnnAssign)}
    assert {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid", "return_logprob"} <= fields
    assert "bootstrap_rooms" not in fields


def test_the_example_is_a_config() -> None:
    config = load_config(str(ROOT / "examples/recipes/disaggregation.yaml"), [])
    assert disaggregation_of(config.rollout) is not None
