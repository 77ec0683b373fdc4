"""A job as one batch script (the templates in templates/, filled in), and its way to the batch system.

Slurm, PBS and LSF take it by their own commands, Ray by `ray job submit`. The same job gives the same script.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from megarl.errors import ConfigError, counted
from megarl.launch.cluster_profile import ClusterProfile, clock
from megarl.launch.job import START_S, Job, checkpoint_bytes, seconds_to_save
from megarl.system.atomic_files import write_text_atomically
from megarl.version import __version__

SUBMIT_WITH = {"slurm": "sbatch", "pbs": "qsub", "lsf": "bsub <"}
"""The batch systems that there is a template for, and what each takes a script by."""
START_DEADLINE_S = 5 * START_S
_OF_SHELLS = re.compile(r"[\s\"'`$\\;&|<>#%*?()!]")
ANSWER_DEADLINE_S = 60
_CONTINUES = {"slurm": "--dependency=afterany:{}", "pbs": "-W depend=afterany:{}", "lsf": "-w ended({})"}


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
    nodes = counted(job.nodes, "node")
    return environment.get_template(f"{system}.sh.j2").render(
        what=f"train {job.config_path.name} as {job.name}, by {job.launcher} on {nodes}",
        version=__version__,
        submit_with=SUBMIT_WITH[system],
        script=script_path(job, system),
        job=job,
        checkpoint_gb=checkpoint_bytes(job) / 1e9,
        save_s=seconds_to_save(job, profile.warn_s),
        profile=profile,
        cwd=cwd,
        output=output,
        label=re.sub(r"[^\w.+-]", "_", job.name, flags=re.ASCII),
        venv=profile.venv or sys.prefix,
        cpus=profile.cpus,
        ray_cpus=_ray_cpus(profile),
        start_s=START_DEADLINE_S,
        mounts=mounts,
        pyxis_mounts=",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts),
        walltime=clock(profile.time_s),
        lsf_minutes=math.ceil(profile.time_s / 60),
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
    return job.run_folder / "jobs" / f"{job.run_folder.name}.{system}.sh"


def submit(system: str, job: Job, script: str, *, chain: int = 1) -> list[str]:
    """Write the script beside the run's files and submit it `chain` times, each after the one before; returns the job ids.

    Raises:
        ConfigError: the batch system is not here, or refused the job; carries its own words.
    """
    program = SUBMIT_WITH[system].split()[0]
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not on this machine; submit from a login node of the cluster, or look with --dry-run")
    path = script_path(job, system)
    write_text_atomically(path, script, is_private=True)  # it has the values of --env
    submitted: list[str] = []
    for _ in range(chain):
        after = shlex.split(_CONTINUES[system].format(submitted[-1])) if submitted else []
        if system == "lsf":  # bsub reads its directives from standard input
            answer = run_quietly([program, *after], stdin=script)
        else:
            answer = run_quietly([program, *after, str(path)])
        submitted.append(job_number(answer))
    return submitted


def job_number(answer: str) -> str:
    """The job's number in what sbatch, qsub or bsub answered."""
    match = re.search(r"Submitted batch job (\d+)|^(\d[\w\[\].-]*)\s*$|Job <(\d+)>", answer, re.M)
    if match is None:
        raise ConfigError(f"the batch system answered no job number, but: {answer.strip() or 'nothing'}")
    return next(group for group in match.groups() if group)


def run_quietly(command: Sequence[str], *, stdin: str | None = None, deadline_s: float = ANSWER_DEADLINE_S) -> str:
    """Run a program of the batch system and give what it printed.

    Raises:
        ConfigError: it failed or did not answer; its own last line is in the sentence.
    """
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} did not answer within {deadline_s:.0f} s; is the batch system up?") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"{command[0]} refused: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def ray_job(job: Job, address: str) -> list[str]:
    """The command that submits `job` to the Ray cluster whose dashboard is at `address`; it runs on the head node.

    Raises:
        ConfigError: the job is one of torchrun.
    """
    if job.launcher != "ray":
        raise ConfigError(f"{job.config_path} is a job of torchrun's; submit it to a batch system, or start it with torchrun")
    program = Path(sys.executable).with_name("ray")
    return [
        str(program), "job", "submit", "--no-wait", f"--address={address}", "--",
        "megarl", "train", str(job.config_path), *job.overrides, f"run.resume={job.resume}",
    ]  # fmt: skip
