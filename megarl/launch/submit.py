"""Handing a job to the batch system: Slurm, PBS and LSF by their own commands, Ray by `ray job submit`."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import ConfigError
from megarl.launch.job import Job
from megarl.launch.render import SUBMIT_WITH, script_path
from megarl.system.atomic_files import write_text_atomically

ANSWER_DEADLINE_S = 60
_CONTINUES = {"slurm": "--dependency=afterany:{}", "pbs": "-W depend=afterany:{}", "lsf": "-w ended({})"}


def submit(system: str, job: Job, script: str, *, chain: int = 1) -> list[str]:
    """Write the script beside the run's files and submit it `chain` times, each after the one before; returns the job ids.

    Raises:
        ConfigError: the batch system is not here, or refused the job; carries its own words.
    """
    program = SUBMIT_WITH[system].split()[0]
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not on this machine; submit from a login node of the cluster, or look with --dry-run")
    path = script_path(job, system)
    write_text_atomically(path, script)
    submitted: list[str] = []
    for _ in range(chain):
        after = shlex.split(_CONTINUES[system].format(submitted[-1])) if submitted else []
        submitted.append(_hand_over(system, [program, *after], path))
    return submitted


def job_number(answer: str) -> str:
    """The job's number in what sbatch, qsub or bsub answered."""
    found = re.search(r"Submitted batch job (\d+)|^(\d[\w\[\].-]*)\s*$|Job <(\d+)>", answer, re.M)
    if found is None:
        raise ConfigError(f"the batch system answered no job number, but: {answer.strip() or 'nothing'}")
    return next(group for group in found.groups() if group)


def _hand_over(system: str, command: list[str], script: Path) -> str:
    text = script.read_text() if system == "lsf" else None  # bsub reads its directives from standard input
    words = command if system == "lsf" else [*command, str(script)]
    answer = run_quietly(words, stdin=text)
    return job_number(answer)


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
