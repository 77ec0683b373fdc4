"""A job as one batch script: the templates in templates/, filled in. Pure: the same job gives the same text."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from megarl.errors import ConfigError
from megarl.launch.cluster_profile import ClusterProfile
from megarl.launch.job import START_S, Job, checkpoint_bytes, seconds_to_save
from megarl.version import __version__

SUBMIT_WITH = {"slurm": "sbatch", "pbs": "qsub", "lsf": "bsub <"}
"""The batch systems that there is a template for, and what each takes a script by."""
START_DEADLINE_S = 5 * START_S
_OF_SHELLS = re.compile(r"[\s\"'`$\\;&|<>#%*?()!]")


def render(system: str, job: Job, profile: ClusterProfile, *, cwd: Path) -> str:
    """The batch script of `job` for `system`, to be run in `cwd`.

    Raises:
        ConfigError: a path or condition cannot stand in the script's directives, which have no quotes that all systems read.
    """
    output = job.run_folder / "jobs"
    _check_texts(job, cwd)
    environment = Environment(
        loader=PackageLoader("megarl.launch"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False, comment_start_string="<#", comment_end_string="#>",
    )  # fmt: skip
    environment.filters["quote"] = lambda text: shlex.quote(str(text))
    mounts = [str(cwd), *profile.mounts]
    total_s = profile.time_s
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    return environment.get_template(f"{system}.sh.j2").render(
        what=f"train {job.config_path.name} as {job.name}, by {job.launcher} on {nodes}",
        version=__version__,
        submit_with=SUBMIT_WITH[system],
        script=script_path(job, system),
        job=job,
        checkpoint_gb=checkpoint_bytes(job) / 1e9,
        save_s=seconds_to_save(job, profile.warn_s),
        profile=profile.model_dump() | {"time_s": total_s},
        cwd=cwd,
        output=output,
        label=re.sub(r"[^\w.+-]", "_", job.name, flags=re.ASCII),
        venv=profile.venv or sys.prefix,
        cpus=profile.cpus,
        ray_cpus=_ray_cpus(profile),
        start_s=START_DEADLINE_S,
        mounts=mounts,
        pyxis_mounts=",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts),
        walltime=f"{total_s // 3600:02d}:{total_s % 3600 // 60:02d}:{total_s % 60:02d}",
        lsf_minutes=math.ceil(total_s / 60),
        warn_minutes=math.ceil(profile.warn_s / 60),
    )


def _check_texts(job: Job, cwd: Path) -> None:
    if not str(job.config_path).isprintable():
        raise ConfigError(f"the config is {str(job.config_path)!r}, whose name a comment cannot hold; rename it")
    if not all(condition.isprintable() for condition in job.after):
        raise ConfigError(f"--after is {', '.join(map(repr, job.after))}, which would end its line; it must be printable")
    for what, path in (("the working folder", cwd), ("run.folder/run.name", job.run_folder)):
        if not str(path).isprintable() or _OF_SHELLS.search(str(path)):
            raise ConfigError(
                f"{what} is {str(path)!r}, which directives of a batch script cannot name; it must be without white space, "
                "quotes and the signs of shells"
            )


def _ray_cpus(profile: ClusterProfile) -> str:
    """The cores of a node as Ray is told them, as shell: on nodes without GPUs their places, which it counts as cores."""
    if not profile.gpus_per_node:
        return str(profile.places)
    return str(profile.cpus_per_node) if profile.cpus_per_node else '"$(nproc)"'


def script_path(job: Job, system: str) -> Path:
    """The path of a submitted job's script."""
    return job.run_folder / "jobs" / f"{job.name}.{system}.sh"
