"""`rollout.host_cache_gb`: what it does not go with, the arguments of servers, and what a plan says of a node's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl import cli
from megarl.config import parse_config
from megarl.errors import ConfigError
from megarl.options.host_cache.checks import SET_BY_IT
from megarl.options.host_cache.sglang import server_arguments
from megarl.rollout.engines.sglang.arguments import server_arguments as arguments_of_sglang
from tests.planning.printed import planned

ROOT = Path(__file__).parents[3]
PLAN = "examples/plans/qwen3-32b-grpo-128xh100-32k-async.yaml"
NODE = """
name: mine
memory_gb: 80
hbm_gb_per_s: 3350
bf16_tflops: 989
fp8_tflops: 1979
nvlink_gb_per_s: 450
network_gb_per_s: 50
host_gb_per_s: 64
node_memory_gb: 1000
"""


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(rollout: dict[str, Any], **sections: Any) -> Any:
    """A run of SGLang's engines with this section `rollout`."""
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}},
        "rewards": [{"name": "exact_number"}],
        "resources": {"placement": "separate"},
        "rollout": rollout,
    }
    return parse_config(tree | sections)


def test_servers_get_sglangs_arguments_and_others_none() -> None:
    assert server_arguments(config_of({"host_cache_gb": 12}), "m") == {"enable_hierarchical_cache": True, "hicache_size": 12}
    assert server_arguments(config_of({}), "m") == {}
    assert {*SET_BY_IT} <= arguments_of_sglang()


@pytest.mark.parametrize(
    ("rollout", "sections", "message"),
    [
        ({"host_cache_gb": -1}, {}, "rollout.host_cache_gb is -1; it must be a whole number of at least 0"),
        ({"host_cache_gb": 1.5}, {}, "rollout.host_cache_gb is 1.5; it must be a whole number"),
        ({"engine": "embedded"}, {}, "rollout.engine = 'embedded' has none; it must be 0"),
        (
            {"weight_transport": "folder", "servers": {"urls": ["http://a"]}},
            {},
            "'sglang' here asks some that run already; it must be 0",
        ),
        ({"engine_args": {"hicache_ratio": 2.0}}, {}, "hicache_ratio is set by rollout.host_cache_gb; remove one of the two"),
        ({"engine_args": {"disable_radix_cache": True}}, {}, "which rollout.engine_args.disable_radix_cache forbids"),
        ({}, {"resources": {"placement": "colocated"}}, "keeps nothing where engines sleep while the trainer works"),
    ],
)
def test_what_it_does_not_go_with_is_one_sentence(rollout: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of({"host_cache_gb": 4} | rollout, **sections)


def test_a_plan_counts_tokens_and_bytes_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-32B on 4 ranks: 64 layers, 2 KV heads of 128 on each, K and V in bfloat16."""
    plain, tree = planned(capsys, PLAN), planned(capsys, PLAN, "rollout.host_cache_gb=100")
    cache, of_token = tree["times"]["host_cache"], 64 * 2 * 2 * 128 * 2
    assert cache["tokens"] == 100_000_000_000 // of_token
    assert cache["node_bytes"] == 8 * 100e9
    assert cache["main_bytes"] == 8 * 100e9 + plain["memory"]["host_bytes_of_a_node"]
    assert cache["back_s"] == pytest.approx(512 * of_token / 64e9, rel=0.6)
    assert "host_cache" not in plain["times"]
    assert cli.main(["plan", PLAN, "rollout.host_cache_gb=1"]) == 0
    assert "Warning: that is less than on the GPU" in capsys.readouterr().out


def test_a_node_that_does_not_hold_it_is_refused_with_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpu.yaml").write_text(NODE)
    gpu = ["--gpu", str(tmp_path / "gpu.yaml")]
    assert cli.main(["plan", PLAN, "rollout.host_cache_gb=200", *gpu]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "rollout.host_cache_gb is 200, with which a node would hold" in said
    most = int(said.rpartition("at most ")[2])
    assert cli.main(["plan", PLAN, f"rollout.host_cache_gb={most}", *gpu]) == 0
    assert cli.main(["plan", PLAN, f"rollout.host_cache_gb={most + 1}", *gpu]) == 2
