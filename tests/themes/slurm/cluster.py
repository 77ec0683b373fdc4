"""A real Slurm on this machine: munged, slurmctld and several slurmd, each in a network namespace of its own.

Everything lives in one folder, listens inside the namespaces, and is ended by the handles of what was started.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.themes.multinode.namespaces import Network
from tests.themes.multinode.namespaces import why_not as why_no_namespaces

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
CONTROLLER_PORT, NODE_PORT = 17_001, 17_002
CONFIG = """
ClusterName=megarl
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
SlurmdTimeout=60
SwitchType=switch/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=tiny Nodes=ALL Default=YES MaxTime=00:30:00 State=UP
PartitionName=closed Nodes=ALL State=DOWN
"""


def why_not() -> str | None:
    """Why Slurm cannot run here; None if it can."""
    missing = [program for program in PROGRAMS if _program(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm munge)"
    return why_no_namespaces()


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class Slurm:
    """A cluster of `count` nodes, as a context manager; commands run where the controller does, with `environment`."""

    def __init__(self, count: int) -> None:
        self.network = Network(count + 1)
        *self.nodes, self.login = self.network.nodes
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.network)
            self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mslurm-", dir="/tmp")))
            self.local = self.folder / "l"
            """A folder of which each node has its own, as on a disk of its own: two that join a Ray would share its sockets."""
            self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
            self.environment |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
            self._configure()
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.run("scancel", "--user=root")
        self._wait_until(lambda: not self.run("squeue", "--noheader"), 30, "jobs to end")
        self._stack.close()

    def run(self, *words: str, check: bool = True) -> str:
        """What a command of Slurm's printed."""
        done = subprocess.run(
            self.login.command(*words), env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def finished(self) -> list[dict[str, str]]:
        """Every end of a job, in order, as `jobcomp/filetxt` wrote it: JobId, JobState, NodeList, ..."""
        lines = (self.folder / "jobs.txt").read_text().splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("slurm*.log")))

    def _configure(self) -> None:
        self.folder.chmod(0o755)
        nodes = "\n".join(
            f"NodeName={node.name} NodeAddr={node.address} CPUs=2 RealMemory=4000 State=UNKNOWN" for node in self.nodes
        )
        text = CONFIG.format(
            host=socket.gethostname(), address=self.login.address, folder=self.folder, nodes=nodes,
            controller_port=CONTROLLER_PORT, node_port=NODE_PORT,
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    def _start(self) -> None:
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self.folder}/{file}" for name, file in (files | {"seed-file": "munge.seed"}).items()]
        self._daemon(["munged", "--foreground", "--force", *options])
        self._wait_until((self.folder / "munge.socket").exists, 10, "munged")
        self._daemon(self.login.command("slurmctld", "-i", "-D"))
        self.local.mkdir()
        for node in self.nodes:
            (own := self.folder / node.name).mkdir()
            shell = f"mount --bind {own} {self.local} && exec slurmd -D -N {node.name}"
            self._daemon(node.command("unshare", "--mount", "sh", "-c", shell))
        ask = ("sinfo", "--noheader", "--Node", "--partition=tiny", "--format=%t")
        self._wait_until(lambda: self.run(*ask, check=False).split() == ["idle"] * len(self.nodes), 30, "idle nodes")

    def _daemon(self, command: list[str]) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # the daemons have logs
        command = ["setpriv", "--pdeathsig", "TERM", *command]  # they end with the test run, however that ends
        process = subprocess.Popen(command, env=self.environment, start_new_session=True, **quiet)
        self._stack.callback(self._end, process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait_until(self, condition: object, seconds: float, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.logs()}"
            time.sleep(0.2)
