"""`megarl doctor --ports` lists every socket that a run or a server listens on, with who may connect, and marks open ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from megarl.cli import main
from megarl.errors import ConfigError
from megarl.launch.ports import Listener, SeenProcess, listeners, listening, render
from tests.launch.test_doctor import text_of_table

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny-arithmetic"
PYTHON = "/venv/bin/python"
TOKEN = {"RAY_AUTH_MODE": "token"}


def seen(command: str, *ports: int, name: str = "python", address: str = "::", **more: object) -> SeenProcess:
    sockets = tuple(("tcp", address, port) for port in ports)
    return SeenProcess(7, name, tuple(command.split()), sockets=sockets, **more)  # type: ignore[arg-type]


RAY = "/venv/lib/ray/core/src/ray"
WHO = {
    "gcs": (seen(f"{RAY}/gcs/gcs_server --log_dir=x", 1), "Ray: GCS", "nothing"),
    "gcs_with_token": (seen(f"{RAY}/gcs/gcs_server", 1, environment=TOKEN), "Ray: GCS", "Ray's token"),
    "raylet": (seen(f"{RAY}/raylet/raylet --a=b", 1, environment=TOKEN), "Ray: raylet", "Ray's token"),
    "figures": (
        seen(f"{PYTHON} -u /venv/lib/ray/autoscaler/_private/monitor.py", 1, environment=TOKEN),
        "Ray: monitor, figures for Prometheus", "nothing; it tells figures and takes no orders",
    ),
    "rank": (seen("ray::RankProcess", 1, name="ray::RankProcess", environment=TOKEN, ray_port=1), "rank: Ray", "Ray's token"),
    "ranks_store": (
        seen("ray::RankProcess", 1, name="ray::RankProcess", environment=TOKEN, ray_port=2),
        "rank: torch.distributed (TCPStore, Gloo, NCCL)", "nothing",
    ),
    "driver": (seen(f"{PYTHON} -m megarl train c.yaml", 1, environment=TOKEN, ray_port=1), "driver: Ray", "Ray's token"),
    "named": (
        seen("/venv/bin/megarl train c.yaml", 1, named={1: ("endpoint of agents", "the key of an open episode")}),
        "endpoint of agents", "the key of an open episode",
    ),
    "drivers_other": (
        seen("/venv/bin/megarl train c.yaml", 1, named={2: ("endpoint of agents", "the key of an open episode")}),
        "driver: not known", "nothing",
    ),
    "torchruns_own": (
        seen(f"{PYTHON} /venv/bin/torchrun --nproc-per-node=2 -m megarl sft c.yaml", 1), "torchrun: rendezvous (TCPStore)",
        "nothing",
    ),
    "torchrun_as_module": (
        seen(f"{PYTHON} -m torch.distributed.run --no-python megarl sft c.yaml", 1), "torchrun: rendezvous (TCPStore)",
        "nothing",
    ),
    "torchrun": (
        seen("/venv/bin/megarl sft c.yaml", 1, environment={"RANK": "0"}),
        "rank under torchrun: torch.distributed (TCPStore, Gloo, NCCL)", "nothing",
    ),
    "sglang": (
        seen(f"{PYTHON} -m megarl.rollout.engines.sglang.launch --host 127.0.0.1 --port 1", 1, address="127.0.0.1"),
        "SGLang server", "the server's token",
    ),
    "sglangs_own": (
        seen("sglang::scheduler", 1, name="sglang::scheduler"), "SGLang: torch.distributed (TCPStore, Gloo, NCCL), ZeroMQ",
        "nothing",
    ),
    "rewards_own": (
        seen(f"{PYTHON} /venv/bin/megarl serve-reward c.yaml --token-file t", 1), "driver: not known", "nothing"
    ),
    "other": (seen("my-server --x", 1, name="my-server"), "a program of the run: my-server", "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHO)
def test_a_listener_is_named_with_what_must_be_brought(name: str) -> None:
    process, role, by = WHO[name]
    [found] = listeners([process])
    assert (found.role, found.by) == (role, by)
    assert found.is_open == (by.startswith("nothing") and process.sockets[0][1] == "::")


@pytest.mark.parametrize(
    ("address", "by", "is_open", "who"),
    [
        ("127.0.0.1", "nothing", False, "any user of this machine"),
        ("::1", "the server's token", False, "any user of this machine and has the server's token"),
        ("127.8.0.1", "nothing", False, "any user of this machine"),
        ("0.0.0.0", "nothing", True, "whoever reaches this machine"),
        ("fe80::1%eth0", "nothing", True, "whoever reaches this machine"),
        ("10.0.0.3", "Ray's token", False, "whoever reaches this machine and has Ray's token"),
    ],
)
def test_what_others_reach_without_a_token_is_marked_and_stands_first(address: str, by: str, is_open: bool, who: str) -> None:
    one = Listener(9, "a", "tcp", address, 5, by)
    assert (one.is_open, one.who) == (is_open, who)
    said = text_of_table(render([one]))
    assert ("open" in said, who in said) == (is_open, True)
    closed = seen("/venv/bin/megarl report --watch r", 5, address="127.0.0.1")
    assert [found.is_open for found in listeners([closed, seen("x", 6)])] == [True, False]


def test_a_socket_that_a_child_inherited_is_its_parents() -> None:
    parent, child = seen("ray::RankProcess", 1, name="ray::RankProcess"), seen("torch_shm_manager", 1, name="torch_shm_manager")
    assert [one.role for one in listeners([parent, child])] == ["rank: torch.distributed (TCPStore, Gloo, NCCL)"]


def test_a_folder_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no folder 'nowhere'; --ports takes the folder of a run"):
        listening("nowhere")


@contextmanager
def running(
    *command: str, until: Callable[[psutil.Process], bool], folder: Path, **environment: str
) -> Iterator[psutil.Process]:
    """`megarl` with these words as a process, from when `until` holds; it is interrupted at the end."""
    taken = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (folder / "out.txt").open("w") as out:
        started = subprocess.Popen(
            [sys.executable, "-m", "megarl", *command], cwd=ROOT, stdout=out, stderr=out,
            env={**taken, "PYTHONPATH": str(ROOT), **environment}, start_new_session=True,
        )  # fmt: skip
    try:
        process = psutil.Process(started.pid)
        while not until(process):
            assert started.poll() is None, (folder / "out.txt").read_text()
            time.sleep(0.1)
        yield process
    finally:
        started.send_signal(signal.SIGINT)
        try:
            started.wait(90)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)


def sockets_of(processes: Sequence[psutil.Process]) -> set[tuple[str, int]]:
    """Addresses and ports on which these processes listen by TCP, as the kernel has them."""
    pids = {process.pid for process in processes}
    every = psutil.net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in every if one.pid in pids and one.status == psutil.CONN_LISTEN}


def listens(process: psutil.Process) -> bool:
    return bool(sockets_of([process]))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_servers_that_run_are_listed_with_their_real_sockets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = tmp_path / "c.yaml", tmp_path / "run"
    (tmp_path / "rewards").mkdir()
    run.mkdir()
    (run / "config.yaml").write_text("run: {name: a}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    tree = {
        "model": {"path": str(tmp_path)}, "data": {"train": {"source": "reasoning_gym", "name": "chain_sum"}},
        "rewards": [{"name": "exact_number"}],
    }  # fmt: skip
    config.write_text(yaml.safe_dump(tree))
    token = {"MEGARL_REWARD_TOKEN": "a-token-of-this-test"}
    serve = ["serve-reward", str(config), "--host", "0.0.0.0", "--port", "0"]
    watch = ["report", str(run), "--watch", "--port", "0"]
    with (
        running(*serve, until=listens, folder=tmp_path / "rewards", **token) as rewards,
        running(*watch, until=listens, folder=tmp_path) as report,
    ):
        assert main(["doctor", "--ports", "--json"]) == 0
        told = [one for one in json.loads(capsys.readouterr().out) if one["process"] in (rewards.pid, report.pid)]
        assert {(one["address"], one["port"]) for one in told} == sockets_of([rewards, report])
        by_role = {one["role"]: (one["address"], one["by"], one["open"]) for one in told}
        assert by_role["reward server"] == ("0.0.0.0", "the server's token", False)
        assert by_role["report --watch"][::2] == ("127.0.0.1", False)
        assert {one.process for one in listening(run)} == {report.pid}, "the server of rewards is no part of this run"
        assert main(["doctor", "--ports", str(run)]) == 0
        assert "any user of this machine" in capsys.readouterr().out
    assert listening(run) == []


DRIVER = """
import socket, sys, time
from pathlib import Path
from types import SimpleNamespace
from megarl.options.telemetry.endpoint import MetricsEndpoint
from megarl.options.agents.server import SessionServer

folder = Path(sys.argv[2])
unknown = socket.create_server(("0.0.0.0", 0))
agents, closed = SessionServer(["policy"]), SessionServer(["policy"])
state = SimpleNamespace(say=print)
guarded = MetricsEndpoint(state, "0.0.0.0", 0, "a-token-of-this-test", folder / "a.json")
unguarded = MetricsEndpoint(state, "127.0.0.1", 0, None, folder / "b.json")
was, _ = closed.port, closed.close()
taken = socket.create_server(("0.0.0.0", was))
ports = [one.port for one in (agents, guarded, unguarded)] + [one.getsockname()[1] for one in (unknown, taken)]
(folder / "ports.part").write_text(" ".join(map(str, ports)))
(folder / "ports.part").rename(folder / "ports")
time.sleep(600)
"""


@contextmanager
def program(*command: str, folder: Path) -> Iterator[psutil.Process]:
    """A program from when it has written the file `ports` in `folder`; ended, with all that it started, at the end."""
    started = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)
    try:
        while not (folder / "ports").is_file():
            assert started.poll() is None
            time.sleep(0.1)
        yield psutil.Process(started.pid)
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait(60)


def as_megarl(folder: Path, code: str) -> str:
    """`code` as a program named megarl."""
    (folder / "megarl").write_text(code)
    return str(folder / "megarl")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_drivers_servers_are_told_apart_and_what_is_not_known_is_open(tmp_path: Path) -> None:
    """Every socket of a driver was said to be the agents' endpoint, a socket of the user's own code as well."""
    megarl = as_megarl(tmp_path, DRIVER)
    with program(sys.executable, megarl, "train", str(tmp_path), folder=tmp_path) as driver:
        ports = [int(port) for port in (tmp_path / "ports").read_text().split()]
        told = {one.port: (one.role, one.by, one.is_open) for one in listening(tmp_path) if one.process == driver.pid}
    assert [told.pop(port) for port in ports] == [
        ("endpoint of agents", "the key of an open episode", False),
        ("metrics for Prometheus", "the token for metrics", False),
        ("metrics for Prometheus", "nothing", False),
        ("driver: not known", "nothing", True),
        ("driver: not known", "nothing", True),
    ]
    assert told == {}


RANK = """
import socket, sys, time
from pathlib import Path

folder = Path(sys.argv[2])
own = socket.create_server(("0.0.0.0", 0))
(folder / "ports.part").write_text(str(own.getsockname()[1]))
(folder / "ports.part").rename(folder / "ports")
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_agent_of_a_batch_scripts_torchrun_is_listed_as_open(tmp_path: Path) -> None:
    """The script starts `torchrun --no-python bash rank.sh`, which names no command of megarl: it was not listed."""
    (tmp_path / "rank.sh").write_text(f"'{sys.executable}' '{as_megarl(tmp_path, RANK)}' sft '{tmp_path}' &\nwait $!\n")
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--nnodes=1", "--node-rank=0", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    with program(torchrun, *words, "--no-python", "bash", str(tmp_path / "rank.sh"), folder=tmp_path) as agent:
        found = listening(tmp_path)
        tree = [agent, *agent.children(recursive=True)]
        assert {(one.address, one.port) for one in found} == sockets_of(tree)
        told = {one.port: (one.process, one.role, one.is_open) for one in found}
    assert told[port] == (agent.pid, "torchrun: rendezvous (TCPStore)", True)
    rank = told[int((tmp_path / "ports").read_text())]
    assert rank[1:] == ("rank under torchrun: torch.distributed (TCPStore, Gloo, NCCL)", True)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TINY.is_dir(), reason="needs models/tiny-arithmetic (make tiny-model)")
def test_a_run_is_listed_whole_and_its_ray_asks_for_a_token(tmp_path: Path) -> None:
    """Whoever reached a port of Ray could run code in the job."""
    run = tmp_path / "runs" / "tiny-grpo"
    words = ["train", "examples/tiny/grpo.yaml", f"run.folder={run.parent}", "run.steps=10000", f"model.path={TINY}"]

    def has_begun(_: psutil.Process) -> bool:
        return (run / "metrics.jsonl").is_file() and bool((run / "metrics.jsonl").stat().st_size)

    with running(*words, until=has_begun, folder=tmp_path) as process:
        found = listening(run)
        tree = [process, *process.children(recursive=True)]
        assert {(one.address, one.port) for one in found} == sockets_of(tree)
        by = {one.role: one.by for one in found}
        for role in ("Ray: GCS", "Ray: raylet", "driver: Ray", "rank: Ray", "engine's actor: Ray"):
            assert by[role] == "Ray's token"
        port = next(one.port for one in found if one.role == "Ray: GCS")
        code = f"import ray; ray.init('127.0.0.1:{port}'); print('reached')"
        taken = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        intruder = subprocess.run([sys.executable, "-c", code], env=taken, capture_output=True, text=True, check=False)
        assert "reached" not in intruder.stdout
        assert "InvalidAuthToken" in intruder.stderr
