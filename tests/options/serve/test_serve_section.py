"""A server's config: what it may leave out, and what it contradicts, each in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import Config, load_any, parse_config, to_yaml
from megarl.data.prompts import rows_of
from megarl.errors import ClusterError, ConfigError, DataError
from megarl.option_list import part
from megarl.options.serve import command
from megarl.options.serve.section import completed, serve_of

SMALLEST: dict[str, Any] = {"model": {"path": "m"}, "serve": {}}


def config_of(serve: dict[str, Any] | None = None, **sections: Any) -> Config:
    return parse_config(SMALLEST | {"serve": serve or {}} | sections)


def rank_of(config: Config) -> int:
    rank: int = part("lora", "section", "policy.lora").lora_of_policy(config.policy).rank
    return rank


def test_a_model_and_a_section_are_a_whole_config() -> None:
    config = config_of()
    serve = serve_of(config)
    assert serve is not None
    assert config.longest_sequence == serve.context_tokens == 4096
    assert rank_of(config) == serve.max_rank == 32
    assert [role.name for role in config.roles] == ["policy"]
    assert config.resources.placement == "separate"
    assert not config.sends_adapters
    assert not config.rewards


def test_what_is_said_is_kept_and_the_rest_follows_from_it() -> None:
    config = config_of({"context_tokens": 1000}, policy={"lora": {"rank": 8}}, data={"max_prompt_tokens": 300})
    serve = serve_of(config)
    assert serve is not None
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens) == (300, 700)
    assert rank_of(config) == serve.max_rank == 8
    assert config_of({"context_tokens": 20_000}).policy.max_tokens_per_micro_batch == 20_000
    whole = config_of({"full_weights": True})
    assert not whole.policy.has_adapters


def test_a_resolved_config_reads_back_to_the_same(tmp_path: Any) -> None:
    config = config_of({"models": {"Qwen/Qwen3-0.6B": None}, "live_models": 3})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_any(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("serve", [None, 5, "yes"])
def test_a_config_without_the_section_is_left_as_it_is(serve: Any) -> None:
    tree = {"model": {"path": "m"}, "serve": serve}
    assert completed(tree) is tree


def test_without_tenants_a_server_listens_to_this_machine_alone() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        config_of({"host": host})
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""):
        with pytest.raises(ConfigError, match="needs keys of tenants"):
            config_of({"host": host})
    config_of({"host": "0.0.0.0", "tenants": "tenants.yaml"})


@pytest.mark.parametrize(
    ("serve", "sections", "message"),
    [
        ({"host": "0.0.0.0"}, {}, "needs keys of tenants: set serve.tenants to a file of keys"),
        ({"tls_key": "k.pem"}, {}, "serve.tls_key needs a certificate: set serve.tls_certificate"),
        ({"tls_certificate": "c.pem"}, {}, "serve.tls_certificate needs its private key: set serve.tls_key"),
        (
            {"models": {"a": "other"}},
            {},
            "serve.models.a is 'other', which is another.*must be null, or model.path = 'm'",
        ),
        (
            {"context_tokens": 100},
            {"data": {"max_prompt_tokens": 50}, "rollout": {"max_new_tokens": 60}},
            "serve.context_tokens is 100, which is not the sum of .* = 50 and .* = 60; it must be 110",
        ),
        (
            {"full_weights": True},
            {"policy": {"lora": {"rank": 4}}},
            "serve.full_weights is true.*be false with policy.lora",
        ),
        ({}, {"policy": {"lora": {"rank": 0}}}, "a server of many models needs adapters: set policy.lora.rank"),
        ({"max_rank": 16}, {"policy": {"lora": {"rank": 8}}}, "policy.lora.rank is 8; it must be serve.max_rank = 16"),
        ({}, {"policy": {"lora": {"sync": "adapters"}}}, "policy.lora.sync is 'adapters'.*must be 'merged' in a server"),
        ({}, {"policy": {"experts": {"bias_update_rate": 0.1}}}, "bias_update_rate is 0.1, which moves biases of the base's"),
        ({}, {"rollout": {"engine": "embedded"}}, "rollout.engine is 'embedded', which"),
        ({}, {"rollout": {"schedule": {"mode": "async"}}}, "rollout.schedule.mode is 'async'.*must be 'sync' in a server"),
        ({}, {"resources": {"placement": "colocated"}}, "resources.placement is 'colocated'.*must be 'separate' in a server"),
        ({}, {"rollout": {"temperature": 0.7}}, "rollout.temperature is 0.7, which would change the log-probs of every client"),
        ({}, {"rollout": {"speculative": {"algorithm": "ngram"}}}, "rollout.speculative is 'given', which drafts by one model"),
        ({}, {"algorithm": {"name": "ppo"}}, "algorithm.advantage is 'gae'.*must be one without a critic in a server"),
        ({}, {"algorithm": {"kl": {"coef": 0.1}}}, "algorithm.kl.coef is 0.1, which is for the loop of `megarl train`"),
        ({}, {"rewards": [{"name": "exact_number"}]}, "rewards is 'given', which is for the loop"),
        ({}, {"run": {"guards": [{"metric": "policy/kl", "above": 1.0, "action": "stop"}]}}, "run.guards is 'given'"),
        ({"max_rank": "high"}, {}, "serve.max_rank is 'high'; it must be a whole number"),
        ({"context": 5}, {}, "serve.context is not a config field"),
    ],
)
def test_a_contradiction_is_one_sentence(serve: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(serve, **sections)
    assert str(caught.value).count("; it must be") <= 1


def test_other_commands_are_told_what_the_config_is_for() -> None:
    with pytest.raises(DataError, match="its clients bring the rows: run it by `megarl serve`, or remove the section"):
        list(rows_of(config_of().data.train))


def test_a_server_on_one_gpu_needs_engines_that_do_not_sleep() -> None:
    sections = {"resources": {"placement": "colocated"}, "rollout": {"engine_args": {"enable_memory_saver": False}}}
    assert config_of(**sections).resources.placement == "colocated"


def test_a_server_on_several_machines_needs_a_folder_that_all_see(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.workers.node_folders.machines_without", lambda folder, machines: ["10.0.0.2"])
    command.check_seen(tmp_path, {"10.0.0.1"})
    with pytest.raises(ClusterError, match=r"^run.folder has '.*', which machine 10.0.0.2 does not see, .* that all machines"):
        command.check_seen(tmp_path, {"10.0.0.1", "10.0.0.2"})
