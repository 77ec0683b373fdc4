"""A job as a task of SkyPilot, for `sky jobs launch`: the scripts of Kubernetes' pods, written by its `run`."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import ConfigError, counted
from megarl.launch.job import Job
from megarl.launch.kubernetes import YamlDumper
from megarl.launch.pod_job import STOPPED, PodRun, pod_runs
from megarl.launch.pod_profile import SkyProfile
from megarl.launch.submit import run_quietly
from megarl.version import __version__

LAUNCH_DEADLINE_S = 900
"""For `sky jobs launch`, which starts a controller of its own where there is none."""

SkyTask = dict[str, Any]


def tasks(job: Job, profile: SkyProfile) -> list[SkyTask]:
    """The tasks of `job`, one for each of its runs.

    Raises:
        ConfigError: the run's name or folder cannot be used, a secret would be shown, or the GPU is not named.
    """
    return [_task(run, profile) for run in pod_runs(job, profile, profile.volumes, "volumes")]


def as_text(job: Job, task: SkyTask) -> str:
    """A task as YAML for `sky jobs launch`."""
    secrets = "".join(f" --secret {name}" for name in task.get("secrets", {}))
    step = f"# A step takes about {job.step.seconds:.3g} s ({job.step.source}).\n" if job.step else ""
    return (
        f"# train {job.config_path.name} as {task['name']}, by {job.launcher} on {counted(job.nodes, 'node')} of SkyPilot\n"
        f"# Written by `megarl submit` {__version__}; to submit it by hand, saved as a file: sky jobs launch{secrets} FILE\n"
        f"{step}" + yaml.dump(task, Dumper=YamlDumper, sort_keys=False, width=130)
    )


def submit(profile: SkyProfile, text: str) -> str:
    """Hand a task to `sky jobs launch` and give what it said.

    Raises:
        ConfigError: sky is not here, a secret is not in the environment, or SkyPilot refused; carries its own words.
    """
    if shutil.which("sky") is None:
        raise ConfigError("sky is not on this machine; install skypilot, or look with --dry-run")
    missing = [name for name in profile.secrets if name not in os.environ]
    if missing:
        raise ConfigError(f"secrets names {missing[0]}, which is not in your environment; export it, or remove it")
    named = [word for name in profile.secrets for word in ("--secret", name)]
    with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
        path = Path(folder) / "task.yaml"
        path.write_text(text)
        return run_quietly(["sky", "jobs", "launch", "--yes", "--detach-run", *named, str(path)], deadline_s=LAUNCH_DEADLINE_S)


def _task(run: PodRun, profile: SkyProfile) -> SkyTask:
    place = f"$HOME/megarl-{run.name}"
    warning = {"run": f'bash "{place}/warn.sh"', "events": ["preemption"], "timeout": profile.warn_s}
    buckets = {path: {"source": url, "mode": "MOUNT"} for url, path in profile.buckets.items()}
    environment = {"PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0", **profile.env}
    return {
        "name": run.name,
        "num_nodes": run.job.nodes,
        "resources": _resources(run.job, profile),
        **({"file_mounts": buckets} if buckets else {}),
        "volumes": {path: name for name, path in profile.volumes.items()},
        "envs": environment,
        **({"secrets": dict.fromkeys(profile.secrets)} if profile.secrets else {}),
        **({"setup": "\n".join(profile.setup) + "\n"} if profile.setup else {}),
        "run": _script(run, profile, place),
        "config": {"hooks": [warning]},
    }  # fmt: skip


def _resources(job: Job, profile: SkyProfile) -> SkyTask:
    gpu = profile.accelerator or (job.config.resources.gpu or "").upper()
    if profile.gpus_per_node and not gpu:
        raise ConfigError("accelerator is not given, and neither is resources.gpu of the config; name the GPU, such as H100")
    return {
        **({"infra": profile.infra} if profile.infra else {}),
        **({"accelerators": f"{gpu}:{profile.gpus_per_node}"} if profile.gpus_per_node else {}),
        "cpus": f"{profile.cpus}+",
        **({"memory": profile.memory} if profile.memory else {}),
        "disk_size": profile.disk_gb,
        "image_id": f"docker:{profile.image}",
        "use_spot": profile.spot,
        # what is preempted is started again in any case; of the run's own ends only that of one that saved
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [STOPPED]},
    }


def _script(run: PodRun, profile: SkyProfile, place: str) -> str:
    """The shell that every node runs: it writes the scripts and starts the one of its node."""
    written = run.files(profile)
    first = "node.sh" if run.job.launcher == "ray" else "driver.sh"
    lines = [
        "set -euo pipefail",
        f'files="{place}"',
        'mkdir -p "$files"',
        "# nodes of one start know it by their addresses",
        'start=$(cksum <<<"$SKYPILOT_NODE_IPS")',
        "export MEGARL_START=${start%% *} MEGARL_RANK=$SKYPILOT_NODE_RANK MEGARL_HEAD=${SKYPILOT_NODE_IPS%%$'\\n'*}",
        'MEGARL_NODE_ADDRESS=$(sed -n "$((SKYPILOT_NODE_RANK + 1))p" <<<"$SKYPILOT_NODE_IPS")',
        "MEGARL_IS_HEAD=no",
        "if ((MEGARL_RANK == 0)); then MEGARL_IS_HEAD=yes; fi",
        "export MEGARL_NODE_ADDRESS MEGARL_IS_HEAD",
        *(here_document(name, text) for name, text in written.items()),
        "# the hook for preemption has another environment",
        'printf "export MEGARL_START=%s MEGARL_IS_HEAD=%s\\n" "$MEGARL_START" "$MEGARL_IS_HEAD" >"$files/start.sh"',
        'cat "$files/start.sh" "$files/job.sh" >"$files/job.new"',
        'mv "$files/job.new" "$files/job.sh"',
        f'exec bash "$files/{first}"',
    ]
    return "\n".join(lines) + "\n"


def here_document(name: str, text: str) -> str:
    """Shell that writes `text` as the file `name` of the folder `$files`; the word that ends it is no line of the text."""
    end = "END"
    while end in text.splitlines():
        end += "_"
    return f"cat >\"$files/{name}\" <<'{end}'\n{text}{'' if text.endswith(chr(10)) else chr(10)}{end}"
