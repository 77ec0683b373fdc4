"""The command lines of Docker and Apptainer that run commands in an episode's folder, and what tells whether they are there.

Docker has one container for an episode, in which every process is ended after each command; Apptainer one for each command. The
keeper fills in `{name}`, `{work}` (the folder), `{user}` and `{environment}`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import EpisodeError
from megarl.options.sandboxes.section import SandboxConfig

ANSWER_S = 30.0
"""For the container program to say what there is."""


@dataclass(frozen=True)
class Container:
    """The way in which commands become containers."""

    wrap: Sequence[str]
    """Words that stand before a command."""
    start: Sequence[str] = ()
    """Starts a container in which commands are run."""
    after: Sequence[str] = ()
    """Ends all processes of a command."""
    recover: Sequence[str] = ()
    """The same where `after` fails."""
    remove: Sequence[str] = ()
    """Ends the container and removes it."""
    variable: str = "--env"
    """The option before `NAME=value`."""
    has_own_user: bool = True
    """Whether it can run as a user that is not the run's."""


WAIT = "while :; do sleep 3600; done"
"""The first process of a container, which cannot be ended from inside."""


def docker(settings: SandboxConfig) -> Container:
    """`docker run` and `docker exec` as in https://docs.docker.com/reference/cli/docker/container/run/."""
    memory = f"{settings.memory_mb}m"
    limits = ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(settings.processes)]
    rights = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "{user}", "--read-only"]
    files = ["--tmpfs", f"/tmp:rw,exec,size={settings.disk_mb}m", "--volume", "{work}:/work", "--workdir", "/work"]
    network = ["--network", "host" if settings.network else "none"]
    begin = ["docker", "run", "--detach", "--rm", "--pull", "never", "--name", "{name}", "--entrypoint", ""]
    image = str(settings.image)
    return Container(
        wrap=["docker", "exec", "--interactive", "--env", "HOME=/work", "{environment}", "{name}"],
        start=[*begin, *network, *limits, *rights, *files, image, "sh", "-c", WAIT],
        after=["docker", "exec", "{name}", "sh", "-c", "kill -9 -1"],
        recover=["docker", "restart", "--time", "0", "{name}"],
        remove=["docker", "rm", "--force", "{name}"],
    )


def apptainer(settings: SandboxConfig) -> Container:
    """`apptainer exec` as in https://apptainer.org/docs/user/latest/cli/apptainer_exec.html."""
    limits = ["--memory", f"{settings.memory_mb}M", "--pids-limit", str(settings.processes)]
    rights = ["--containall", "--no-privs", "--no-home", "--bind", "{work}:/work", "--pwd", "/work"]
    network = [] if settings.network else ["--net", "--network", "none"]
    wrap = ["apptainer", "--silent", "exec", *rights, *network, *limits, "--env", "HOME=/work", "{environment}"]
    return Container([*wrap, str(settings.image)], has_own_user=False)


def found_container(settings: SandboxConfig) -> Container | None:
    """What `settings.kind` asks for: None for `seccomp`, and for `auto` where no container program is of use.

    Raises:
        EpisodeError: the kind that is named is not there, or its image is not.
    """
    kind = settings.kind
    if kind == "seccomp" or settings.image is None:
        return None
    for name, make, problem_of in (("docker", docker, _problem_of_docker), ("apptainer", apptainer, _problem_of_apptainer)):
        if kind in (name, "auto"):
            problem = problem_of(settings.image)
            if not problem:
                return make(settings)
            if kind == name:
                raise EpisodeError(f"rollout.episode.sandbox.kind is '{name}', but {problem}")
    return None


def _problem_of_docker(image: str) -> str:
    if shutil.which("docker") is None:
        return "there is no program 'docker'"
    if failure := _failure("docker", "version", "--format", "{{.Server.Version}}"):
        return f"its daemon does not answer: {failure}"
    if _failure("docker", "image", "inspect", "--format", "{{.Id}}", image):
        return f"the image '{image}' (rollout.episode.sandbox.image) is not on this machine; try `docker pull {image}`"
    return ""


def _problem_of_apptainer(image: str) -> str:
    if shutil.which("apptainer") is None:
        return "there is no program 'apptainer'"
    if not Path(image).exists():
        return f"there is no file '{image}' (rollout.episode.sandbox.image); try `apptainer pull`"
    return ""


def _failure(*argv: str) -> str:
    """What a command says that fails; an empty text if it does not."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or [f"it exited with {done.returncode}"])[-1] if done.returncode else ""
