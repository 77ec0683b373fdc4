"""The price of a plan is what a count of its transfers, one by one, comes to."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.weights.cost import ClusterRates, cost_of
from megarl.weights.plan import ReshardPlan, plan_reshard
from megarl.weights.sglang_targets import EVERY_RANK, EngineTarget
from tests.weights.layouts import hf_config, source

CLUSTER = ClusterRates(gpus_per_node=3, copy_gb_per_s=8.0, nvlink_gb_per_s=4.0, ib_gb_per_s=1.0, host_gb_per_s=0.5)


def counted(
    plan: ReshardPlan, first_gpu: int, gpus: int
) -> tuple[dict[str, Counter[int]], dict[str, Counter[int]], Counter[int]]:
    """Bytes out of and into each GPU by link, and packed on each."""
    out = {link: Counter[int]() for link in ("same GPU", "NVLink", "InfiniBand")}
    into, packed = {link: Counter[int]() for link in out}, Counter[int]()
    for rank in range(plan.layout.world_size):
        for bucket in plan.sends(rank):
            packed[rank] += bucket.nbytes
            for engine in bucket.engines:
                for transfer, to in product(plan.contents(bucket), range(plan.target.ranks)):
                    if transfer.engine_rank not in (to, EVERY_RANK):
                        continue
                    gpu = (first_gpu + engine * plan.target.ranks + to) % gpus
                    link = "same GPU" if gpu == rank else "NVLink" if gpu // 3 == rank // 3 else "InfiniBand"
                    out[link][rank] += transfer.nbytes
                    into[link][gpu] += transfer.nbytes
    return out, into, packed


@pytest.mark.parametrize(("colocated", "engines", "whole"), [(True, 2, "none"), (True, 5, "experts"), (False, 3, "none")])
def test_bytes_by_link_are_those_of_every_transfer(colocated: bool, engines: int, whole: str) -> None:
    layout = source("ep4 tp2", "deepseek_v3")  # 16 ranks
    plan = plan_reshard(hf_config("deepseek_v3"), layout, EngineTarget(4, 2, 1, engines, whole), itemsize=4, bucket_bytes=3000)
    cost = cost_of(plan, CLUSTER, colocated=colocated)
    out, into, packed = counted(plan, *((0, 16) if colocated else (18, 18 + 4 * engines)))
    found = {link.name: (link.nbytes, link.busiest_out, link.busiest_in) for link in cost.links}
    for name in out:
        assert found[name] == (out[name].total(), max(out[name].values(), default=0), max(into[name].values(), default=0))
    assert found["packing"] == (packed.total(), max(packed.values()), 0)
    across = [sum((of[link] for link in ("NVLink", "InfiniBand")), Counter[int]()) for of in (out, into)]
    assert found["main memory"] == (across[0].total(), max(across[0].values()), max(across[1].values()))
    assert sum(found[name][0] for name in out) == engines * plan.received_bytes.sum()
    of_rank = sum(out.values(), Counter[int]())
    assert cost.sent == (min(of_rank[rank] for rank in range(16)), max(of_rank.values()))
    assert cost.redundancy == plan.received_bytes.sum() / plan.own_bytes
    assert (cost.redundancy == 1) is (whole == "none")
    assert cost.peak_staging_bytes <= 2 * plan.load_bytes


def test_the_slowest_share_bounds_the_prediction() -> None:
    plan = plan_reshard(hf_config("llama"), source("tp2", "llama"), EngineTarget(engines=1), itemsize=4)
    slow = cost_of(plan, CLUSTER, colocated=False)
    received = slow.received[0]
    assert slow.bound.name == "main memory"
    assert slow.seconds == received / 0.5e9
    direct = cost_of(plan, ClusterRates(gpus_per_node=3, ib_gb_per_s=1.0), colocated=False)
    assert (direct.bound.name, direct.bound.where, direct.seconds) == ("InfiniBand", "into GPU 3", received / 1e9)
    near = cost_of(plan, ClusterRates(gpus_per_node=3, nvlink_gb_per_s=0.1), colocated=True)
    assert (near.bound.name, near.bound.where) == ("NVLink", "out of GPU 1")


def test_whole_tensors_are_redundant() -> None:
    plan = plan_reshard(hf_config("llama"), source("tp2", "llama"), EngineTarget(tp=2, whole="all"), itemsize=4)
    cost = cost_of(plan, ClusterRates(), colocated=True)
    assert cost.redundancy == 2 * plan.tensors.nbytes.sum() / plan.own_bytes
    assert cost.received == (plan.tensors.nbytes.sum(),) * 2


def test_a_cluster_is_read_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("ib_gb_per_s: 25\nhost_gb_per_s: null\n")
    assert ClusterRates.read(tmp_path / "c.yaml") == ClusterRates(ib_gb_per_s=25)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ib_gbs: 25", r"ib_gbs is not a field of a cluster \(did you mean 'ib_gb_per_s'\?\); it has gpus_per_node, "),
        ("gpus_per_node: 2.5", "gpus_per_node is 2.5; it must be a whole number above 0"),
        ("ib_gb_per_s: 0", "ib_gb_per_s is 0; it must be a number above 0"),
        ("nvlink_gb_per_s: fast", "nvlink_gb_per_s is 'fast'; it must be a number above 0"),
        ("copy_gb_per_s: null", "copy_gb_per_s is null; it must be a number above 0"),
        ("host_gb_per_s: true", "host_gb_per_s is true; it must be a number above 0"),
    ],
)
def test_a_wrong_cluster_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        ClusterRates.read(tmp_path / "c.yaml")
