"""Values that pods of a run are given: its name, its folder, the scripts that they run, and what these are told.

Kubernetes and SkyPilot start the same scripts (templates/pods/); `job.sh` has everything that differs between two runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from megarl.config.secrets import is_secret, redacted
from megarl.config.yaml_tree import apply_overrides, read_yaml, tree_places
from megarl.errors import ConfigError
from megarl.launch.job import Job, spare_places
from megarl.launch.pod_profile import ContainerProfile, mount_of
from megarl.launch.submit import START_DEADLINE_S
from megarl.version import __version__

LONGEST_NAME = 45
"""Characters of a name, to which Kubernetes, KubeRay and JobSet add numbers and endings of their own up to 63."""
STOPPED = 75
"""Exit code of a run that saved and wants to be started again."""
LARGEST_CONFIG = 900_000
"""Bytes of a config; Kubernetes takes 1 MiB of files."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class PodRun:
    """One run in pods: its name, the number of its seed, and its folder as pods see it."""

    job: Job
    name: str
    folder: PurePosixPath
    overrides: tuple[str, ...]

    def files(self, profile: ContainerProfile, ended: str = "") -> dict[str, str]:
        """The files that pods see in one folder. `$MEGARL_START`, which pods have, tells one start of the run from another.

        `ended`: name of a file that keeps the exit code with which the run ended, for who would start it again (empty: none).

        Raises:
            ConfigError: the config holds a secret, or is too large.
        """
        text = self.job.config_path.read_text()
        if len(text.encode()) > LARGEST_CONFIG:
            raise ConfigError(f"{self.job.config_path} has {len(text.encode())} bytes; it must be at most {LARGEST_CONFIG}")
        _check_secrets(self.job)
        return {"run.yaml": text, "job.sh": self._told(profile, ended), **scripts()}

    def _told(self, profile: ContainerProfile, ended: str) -> str:
        quoted = shlex.quote
        arguments = " ".join(['"$files/run.yaml"', *map(quoted, self.overrides)])
        cpus = profile.cpus if profile.gpus_per_node else profile.places
        lines = [
            f"# What the scripts beside this file are told of {self.name}; written by `megarl submit` {__version__}.",
            f"workdir={quoted(profile.workdir)}",
            f"run={quoted(str(self.folder))}",
            f"job=$run/jobs/{self.name}.$MEGARL_START",
            f"ended={f'$run/jobs/{ended}' if ended else ''}",
            f"launcher={self.job.launcher}",
            f"nodes={self.job.nodes}",
            f"gpus={profile.gpus_per_node}",
            f"ranks_per_node={self.job.ranks_per_node}",
            f"limit_s={profile.time_s - profile.warn_s}",
            f"start_s={START_DEADLINE_S}",
            f"replaces_ranks={'no' if spare_places(self.job.config) is None else 'yes'}",
            f"ray_options=(--num-cpus={cpus} --num-gpus={profile.gpus_per_node})",
            f"arguments=({arguments})",
            f"resume={quoted(self.job.resume)}",
        ]
        return "\n".join(lines) + "\n"


def pod_runs(job: Job, profile: ContainerProfile, mounts: Mapping[str, str], volumes: str) -> list[PodRun]:
    """The runs of a job, one for each seed. `mounts` are volumes and where they are mounted, named by the field `volumes`.

    Raises:
        ConfigError: Kubernetes does not take the run's name, or no volume holds the run's folder.
    """
    check_name(job.name if not job.seeds else f"{job.name}-seed{max(job.seeds)}", job.name)
    folder = PurePosixPath(profile.workdir, job.config.run_folder)
    if mount_of(folder, mounts) is None:
        raise ConfigError(
            f"run.folder/run.name is {folder} in the pods, which is on no volume, so that checkpoints would be lost with a "
            f"pod; mount one there with {volumes}, or change run.folder or workdir"
        )
    if not job.seeds:
        return [PodRun(job, job.name, folder, job.overrides)]
    names = {seed: f"{job.name}-seed{seed}" for seed in job.seeds}
    return [
        PodRun(job, name, folder.parent / name, (*job.overrides, f"run.seed={seed}", f"run.name={name}"))
        for seed, name in names.items()
    ]


def check_name(name: str, run_name: str) -> None:
    """Refuse a name that Kubernetes objects cannot have; `run_name` is what the user wrote.

    Raises:
        ConfigError: names one that they can have.
    """
    if _NAME.fullmatch(name) and len(name) <= LONGEST_NAME:
        return
    possible = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    possible = re.sub(r"^[^a-z]+", "", possible)[: LONGEST_NAME - len(name) + len(run_name)].strip("-") or "run"
    why = f"with its seed has {len(name)} characters" if _NAME.fullmatch(name) and len(run_name) <= LONGEST_NAME else ""
    raise ConfigError(
        f"run.name is '{run_name}', which {why or 'is no name of a Kubernetes object'}; it must be lower-case letters, digits "
        f"and -, a letter first and no - last, at most {LONGEST_NAME} characters, such as {possible}"
    )


def scripts() -> dict[str, str]:
    """The scripts of templates/pods/ by name."""
    folder = files("megarl.launch") / "templates" / "pods"
    return {entry.name: entry.read_text() for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)}


def _check_secrets(job: Job) -> None:
    """Refuse secrets in the config or its overrides: everybody could read them who reads the manifest."""
    tree = apply_overrides(read_yaml(job.config_path), job.overrides)
    for path, value in tree_places(tree):
        named = is_secret(path.rpartition(".")[2]) and isinstance(value, str) and value
        if named or (isinstance(value, str) and redacted(value) != value):
            raise ConfigError(
                f"{path} of {job.config_path} is a secret, which everybody could read who reads the manifest; "
                "remove it there, and give it by an environment variable of the profile's secrets"
            )
