"""`megarl submit slurm --preflight`: what would go wrong with a job, asked of the cluster before it waits in the queue.

The questions to Slurm are sinfo's and scontrol's own; the nodes are asked by a job of seconds.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError, counted, nearest
from megarl.launch.agree import GIB, agree
from megarl.launch.cluster_profile import ClusterProfile, clock
from megarl.launch.doctor import Finding
from megarl.launch.job import Job, checkpoint_bytes
from megarl.launch.node_facts import NodeFacts, read_facts
from megarl.launch.submit import run_quietly

NODES_DEADLINE_S = 120


@dataclass(frozen=True)
class Partition:
    """A partition as sinfo shows it; `time_s` is None without a limit."""

    name: str
    is_default: bool
    is_up: bool
    time_s: int | None
    nodes: int
    gpus_per_node: int


def check_site(job: Job, profile: ClusterProfile) -> list[Finding]:
    """The checks that need no node: partition, container or environment, disk, time against the checkpoint interval.

    Raises:
        ConfigError: the job cannot run; one sentence that says what to change.
    """
    if shutil.which("sinfo") is None:
        raise ConfigError("sinfo is not on this machine; run --preflight on a login node of the cluster")
    partitions = parse_partitions(run_quietly(["sinfo", "--noheader", "--format=%P|%a|%l|%D|%G"]))
    partition = check_partition(partitions, job, profile)
    return [
        Finding(
            "partition", f"{partition.name}: {counted(partition.nodes, 'node')}, {counted(partition.gpus_per_node, 'GPU')} each"
        ),
        _runtime(profile),
        _disk(job),
        _save_interval(job, profile),
    ]


def parse_partitions(text: str) -> list[Partition]:
    """Partitions from lines of `%P|%a|%l|%D|%G`; a partition with several kinds of nodes has several lines."""
    partitions = []
    for line in text.strip().splitlines():
        name, state, limit, nodes, gres = line.split("|")
        gpus = sum(int(part.split("(")[0].split(":")[-1]) for part in gres.split(",") if part.startswith("gpu"))
        partitions.append(Partition(name.rstrip("*"), name.endswith("*"), state == "up", _seconds(limit), int(nodes), gpus))
    return partitions


def check_partition(partitions: Sequence[Partition], job: Job, profile: ClusterProfile) -> Partition:
    """The partition that the job goes to.

    Raises:
        ConfigError: it does not exist, is down, or has too few nodes, GPUs or hours.
    """
    names = sorted({partition.name for partition in partitions})
    matching = [p for p in partitions if (p.name == profile.partition if profile.partition else p.is_default)]
    if not matching:
        if profile.partition is None:
            raise ConfigError(f"partition is not given and the cluster has no default; it must be {', '.join(names)}")
        hint = nearest(profile.partition, names)
        raise ConfigError(f"partition is '{profile.partition}', but the cluster has {', '.join(names)}{hint}")
    name = matching[0].name
    if not matching[0].is_up:
        others = [p.name for p in partitions if p.is_up]
        raise ConfigError(f"partition '{name}' is down; it must be {', '.join(others) or 'none now: ask the operators'}")
    fitting = [p for p in matching if p.gpus_per_node >= profile.gpus_per_node]
    most = max(p.gpus_per_node for p in matching)
    if not fitting:
        raise ConfigError(
            f"gpus_per_node is {profile.gpus_per_node}, but partition '{name}' has nodes of {most}; "
            f"set --gpus-per-node {most}, or take another of {', '.join(names)}"
        )
    nodes = sum(p.nodes for p in fitting)
    if nodes < job.nodes:
        raise ConfigError(
            f"the job needs {counted(job.nodes, 'node')}, but partition '{name}' has {nodes}; take another, or fewer ranks"
        )
    limit = fitting[0].time_s
    if limit is not None and profile.time_s > limit:
        raise ConfigError(
            f"time is {profile.time}, but partition '{name}' ends jobs after {_as_time(limit)}; ask for "
            f"--time {_as_time(limit)} or less: the run is put back into the queue and goes on"
        )
    return Partition(name, is_default=fitting[0].is_default, is_up=True, time_s=limit, nodes=nodes, gpus_per_node=most)


def ask_nodes(job: Job, profile: ClusterProfile) -> list[NodeFacts]:
    """Facts of as many nodes as the job will have, by a job of seconds; refuses nodes that do not see each other's files.

    Raises:
        ConfigError: no nodes within two minutes, a node without megarl, no shared folder, or nodes that do not agree.
    """
    job.run_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="preflight-", dir=job.run_folder) as folder:
        command = [
            "srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1", "--time=5", "--quiet",
            f"--immediate={NODES_DEADLINE_S}", f"--job-name={job.name}-preflight", *_srun_options(profile),
            *_inside(profile), "megarl", "node", "describe", folder, "--disk", profile.local_folder, "--count", str(job.nodes),
        ]  # fmt: skip
        run_quietly(command, deadline_s=2 * NODES_DEADLINE_S)
        nodes = read_facts(folder, count=job.nodes)
    agree(nodes, nodes[0].name, interface=profile.interface, ports_from=0, gpus=profile.gpus_per_node)
    return nodes


def _srun_options(profile: ClusterProfile) -> list[str]:
    pairs = {"partition": profile.partition, "account": profile.account, "qos": profile.qos}
    options = [f"--{name}={value}" for name, value in pairs.items() if value]
    gpus = f"--gres={profile.gres}" if profile.gres else f"--gpus-per-node={profile.gpus_per_node}"
    options += [gpus] if profile.gpus_per_node else []
    options += [line for line in profile.directives if line.startswith("--")]
    if profile.runtime == "pyxis":
        cwd = Path.cwd()
        options += [f"--container-image={profile.image}", f"--container-mounts={','.join([f'{cwd}:{cwd}', *profile.mounts])}"]
    return options


def _inside(profile: ClusterProfile) -> list[str]:
    if profile.runtime == "venv":
        return ["env", f"PATH={profile.venv or sys.prefix}/bin:/usr/bin:/bin"]
    return ["apptainer", "exec", "--bind", str(Path.cwd()), str(profile.image)] if profile.runtime == "apptainer" else []


def _runtime(profile: ClusterProfile) -> Finding:
    if profile.runtime == "venv":
        python = Path(profile.venv or sys.prefix) / "bin" / "megarl"
        if not python.exists():
            raise ConfigError(f"venv is '{profile.venv}', but there is no {python}; make the environment, or name another")
        return Finding("environment", f"{python.parent.parent}")
    image = str(profile.image)
    if ("://" not in image and "#" not in image and image.endswith((".sif", ".sqsh"))) or image.startswith("/"):
        if not Path(image).is_file():
            near = [str(path) for path in Path(image).parent.glob("*") if path.suffix in (".sif", ".sqsh")]
            raise ConfigError(f"image is '{image}', but there is no such file{nearest(image, near)}; build or pull it first")
        return Finding("container", f"{image}, {Path(image).stat().st_size / GIB:.1f} GiB")
    return Finding("container", f"{image} is pulled by the nodes", "note", "a local .sif or .sqsh file starts sooner")


def _disk(job: Job) -> Finding:
    existing = next(folder for folder in (job.run_folder, *job.run_folder.parents) if folder.exists())
    free, size = shutil.disk_usage(existing).free, checkpoint_bytes(job)
    copies = (job.config.run.keep_checkpoints or 1) + 1  # one more while it is written
    runs = max(len(job.seeds), 1)
    needed = size * copies * runs
    if free < needed:
        raise ConfigError(
            f"run.folder has {free / GIB:.1f} GiB free, but {copies} checkpoints of about {size / GIB:.1f} GiB for {runs} runs "
            f"take {needed / GIB:.1f} GiB; set run.folder to a larger disk, or run.keep_checkpoints to less"
        )
    return Finding("disk", f"{free / GIB:.1f} GiB free at {existing}; a checkpoint takes about {size / GIB:.2f} GiB")


def _save_interval(job: Job, profile: ClusterProfile) -> Finding:
    every, step_s = job.config.run.save_every, job.step.seconds if job.step is not None else None
    if not every:
        return Finding(
            "checkpoints", "saved when the batch system warns, and at the end", "note",
            "set run.save_every: a node that fails does not warn",
        )  # fmt: skip
    if step_s is None:
        return Finding(
            "checkpoints", f"every {counted(every, 'step')}; how long a step takes is not known yet (--step-seconds)"
        )
    interval = every * step_s
    if interval > profile.time_s - profile.warn_s:
        return Finding(
            "checkpoints",
            f"every {counted(every, 'step')}, about {interval / 60:.0f} min, which is longer than the job",
            "note",
            f"set run.save_every to {max(1, int((profile.time_s - profile.warn_s) / step_s / 4))}",
        )  # fmt: skip
    return Finding(
        "checkpoints", f"every {counted(every, 'step')}, about {interval / 60:.0f} min; the job ends after {profile.time}"
    )


def _seconds(limit: str) -> int | None:
    """Seconds of sinfo's `infinite`, `D-HH:MM:SS`, `HH:MM:SS` or `MM:SS`."""
    if limit in ("infinite", "UNLIMITED", "n/a"):
        return None
    days, _, hours = limit.rpartition("-")
    seconds = 0
    for part in hours.split(":"):
        seconds = seconds * 60 + int(part)
    return int(days or 0) * 86_400 + seconds


def _as_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86_400)
    return f"{days}-{clock(rest)}" if days else clock(rest)
