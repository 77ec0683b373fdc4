"""Nodes that cannot work together are named, and those that can agree on an interface and on ports that are free."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from megarl.cli import main
from megarl.errors import ConfigError
from megarl.launch import node_facts
from megarl.launch.agree import agree, choose_interface, choose_ports, verdicts
from megarl.launch.cluster_doctor import compare, examine_cluster
from megarl.launch.node_facts import (
    GpuStatus,
    NodeFacts,
    describe_node,
    facts_from,
    free_port_blocks,
    parse_gpus,
    read_facts,
    write_facts,
)

GIB = 1024**3
GPU = GpuStatus("H100", "580.1", 4, 81_559, 35, 0, False)


def node(name: str, number: int, **changes: object) -> NodeFacts:
    facts = NodeFacts(
        name=name, hostname=name, versions={"megarl": "0.1.0", "torch": "2.13"}, cores=64,
        memory_bytes=512 * GIB, free_disk_bytes=100 * GIB, free_shared_bytes=100 * GIB,
        interfaces={"eth0": (f"10.0.0.{number}", 24, 1000), "ib0": (f"10.1.0.{number}", 24, 100_000)},
        free_ports=(10_000, 11_000, 12_000), gpus=(GPU,) * 8, shm_bytes=64 * GIB,
    )  # fmt: skip
    return replace(facts, **changes)  # type: ignore[arg-type]


def test_the_fastest_interface_that_all_have_is_chosen_and_a_wrong_one_refused() -> None:
    nodes = [node("a", 1), node("b", 2)]
    assert choose_interface(nodes, None) == "ib0"
    assert choose_interface(nodes, "eth0") == "eth0"
    with pytest.raises(ConfigError, match="interface is 'ib1', but it is not up on every node; it must be eth0, ib0"):
        choose_interface(nodes, "ib1")
    same = ("172.17.0.1", 16, 200_000)  # docker0 has one address everywhere
    bridged = [replace(n, interfaces=n.interfaces | {"docker0": same}) for n in nodes]
    assert choose_interface(bridged, None) == "ib0"
    routed = [nodes[0], replace(nodes[1], interfaces=nodes[1].interfaces | {"ib0": ("10.2.0.2", 24, 100_000)})]
    assert choose_interface(routed, None) == "eth0"  # one network is sure to be connected
    with pytest.raises(ConfigError, match=r"no network interface of one name connects the 2 nodes \(a has x; b has y\)"):
        choose_interface(
            [node("a", 1, interfaces={"x": ("10.0.0.1", 24, 0)}), node("b", 2, interfaces={"y": ("10.0.0.2", 24, 0)})], None
        )


def test_ports_are_free_on_every_node_and_spread_over_jobs() -> None:
    nodes = [node("a", 1), node("b", 2, free_ports=(11_000, 12_000, 13_000))]
    assert {choose_ports(nodes, job) for job in range(10)} == {11_000, 12_000}
    with pytest.raises(ConfigError, match="no 1000 ports in a row below the ephemeral range are free"):
        choose_ports([node("a", 1, free_ports=()), node("b", 2)], 0)


def test_a_block_with_a_taken_port_and_the_ephemeral_range_are_left_alone() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = free_port_blocks()[0]
    with socket.socket() as taken:
        taken.bind(("", first + 3))
        taken.listen()
        assert first not in free_port_blocks()
    assert max(free_port_blocks()) + 1000 <= lowest
    assert free_port_blocks(lowest_ephemeral=11_500) in ([10_000], [])


def test_nodes_that_cannot_work_together_are_named() -> None:
    good = node("a", 1)
    other = node("b", 2, versions={"megarl": "0.1.0", "torch": "2.12"})
    with pytest.raises(ConfigError, match=r"torch is 2\.13 on most nodes, but b has 2\.12; use one environment or image"):
        agree([good, node("c", 3), other], "a", interface=None, ports_from=0, gpus=8)
    with pytest.raises(ConfigError, match="b shows 7 GPUs, but the job has 8 on each node; leave the node out"):
        agree([good, node("b", 2, gpus=(GPU,) * 7)], "a", interface=None, ports_from=0, gpus=8)


def test_what_the_nodes_agree_on_is_read_back_by_a_shell(tmp_path: Path) -> None:
    agreement = agree([node("a", 1), node("b-2", 2)], "b-2", interface=None, ports_from=1, gpus=8)
    (tmp_path / "agreed.sh").write_text(agreement.shell(tmp_path / "a token"))
    ask = "source ./agreed.sh; echo $head_name $head_address ${addresses[a]} $first_port"
    ask += "; env | grep IFNAME; echo $RAY_AUTH_TOKEN_PATH"
    shown = subprocess.run(
        ["bash", "-euc", ask], cwd=tmp_path,
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert shown[:4] == ["b-2", "10.1.0.2", "10.1.0.1", "11000"]
    assert sorted(shown[4:6]) == ["GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME=ib0"]
    assert shown[6:] == [f"{tmp_path}/a", "token"]


def test_a_node_s_facts_are_those_of_the_machine_and_survive_the_file(tmp_path: Path) -> None:
    facts = describe_node(tmp_path)
    assert facts.memory_bytes == psutil.virtual_memory().total
    assert facts_from(asdict(facts)) == facts
    write_facts(tmp_path, facts)
    assert read_facts(tmp_path, count=1) == [facts]


@pytest.mark.parametrize("text", ["", '{"name": "b"', "[]", "{}", '{"gpus": 3}', "[" * 100_000])
def test_a_file_whose_content_is_not_seen_yet_is_waited_for(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe_node(tmp_path)
    file = tmp_path / f"{facts.name}.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"what {facts.name} wrote to .* is not seen on"):
        read_facts(tmp_path, count=1, deadline_s=0.0, names=(facts.name,))
    monkeypatch.setattr(node_facts.time, "sleep", lambda _: write_facts(tmp_path, facts))
    assert read_facts(tmp_path, count=1) == [facts]


def test_a_folder_that_is_not_shared_is_said(tmp_path: Path) -> None:
    write_facts(tmp_path, node("a", 1))
    with pytest.raises(
        ConfigError, match=r"what b wrote to .* is not seen on .*; run\.folder must be on a file system that all"
    ):
        read_facts(tmp_path, count=2, deadline_s=0.1, names=("a", "b"))


def test_sick_gpus_and_slow_links_are_remarked() -> None:
    listed = (
        "NVIDIA H100 80GB HBM3, GPU-1, 580.65, 12, 81559, 34, 0, Not Active\n"
        "NVIDIA H100 80GB HBM3, GPU-2, 580.65, 70000, 81559, 91, 3, Active\n"
        "NVIDIA L4, GPU-3, 580.65, 1, 23034, 40, [N/A], Not Active\n"
    )
    gpus = parse_gpus(listed)
    assert [gpu.uncorrected_errors for gpu in gpus] == [0, 3, None]
    sick = node("b", 2, gpus=tuple(gpus[:2]))
    assert verdicts(sick, [sick]) == [
        "GPU 1: 3 uncorrected memory errors", "GPU 1: slowed by its hardware, 91 °C", "GPU 1: 70000 MiB are in use",
    ]  # fmt: skip
    links = [{"clock_s": 0.0, "gb_per_s": rate, "latency_s": 1e-5} for rate in (12.0, 11.5, 3.0)]
    links[1]["clock_s"] = -60.0
    report = compare("test", [node("a", 1), node("b", 2), node("c", 3)], "ib0", links)
    assert report.problems == (
        "b: its clock is -60.0 s off; synchronise it (chrony)", "c: sends 3.00 GB/s, where 11.50 is usual",
    )  # fmt: skip


def test_doctor_over_one_node_says_that_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAY_ADDRESS", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    report = examine_cluster(tmp_path)
    assert [entry.facts.hostname for entry in report.nodes] == [socket.gethostname()]
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor", "--cluster", "--shared", str(tmp_path)]) in (0, 1)
    assert "this machine alone" in capsys.readouterr().out
    assert main(["doctor", "--cluster", "--shared", str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_clocks_and_links_are_measured_between_processes() -> None:
    port = free_port_blocks()[-1]
    measure = (
        "import json, sys, time; from megarl.launch import network\n"
        "plan = json.loads(sys.argv[1]); ahead = 30.0 * plan['rank']; now = time.time\n"
        "network.time.time = lambda: now() + ahead\n"
        "print(json.dumps(network.measure(plan)))"
    )
    plan = {"world_size": 2, "address": "127.0.0.1", "port": port, "interface": "lo", "backend": "gloo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", measure, json.dumps(plan | {"rank": rank})], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=60)[0].splitlines()[-1]) for rank in ranks]
    assert found[0]["clock_s"] == 0.0
    assert found[1]["clock_s"] == pytest.approx(30.0, abs=0.2)  # its clock was put ahead
    assert all(link["gb_per_s"] > 0.01 and 0 < link["latency_s"] < 1 for link in found)
