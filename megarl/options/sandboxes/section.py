"""The section `rollout.episode.sandbox`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Positive, Seconds, Section


class SandboxConfig(Section):
    """A folder for each episode, in which tools and agents run commands that reach nothing else (docs/sandboxes.md)."""

    kind: Literal["none", "auto", "seccomp", "docker", "apptainer"] = "none"
    """`seccomp`: the kernel confines commands on this machine. `docker`, `apptainer`: in containers of `image`. `auto`: a
    container where there is one and `image` is set, else `seccomp`."""
    image: str | None = None
    """Image of `docker` (a name; it is never pulled) or `apptainer` (a file). Its `sh` runs the commands."""
    memory_mb: Positive = 2048
    """Memory in MiB of all processes of a command together; under `seccomp` also the address space of each of them."""
    processes: Positive = 64
    """Maximum number of processes (and threads) of a command."""
    disk_mb: Positive = 256
    """Size of the folder in MiB; a command that fills it further is ended. A folder with more than twice as much is emptied."""
    output_kb: Positive = 64
    """KiB of a command's output and of its errors that are kept; one that prints 64 times as much is ended."""
    timeout_s: Seconds = 30.0
    """Time limit in seconds for one command."""
    network: bool = False
    """Whether commands reach the network. An agent's command under `seccomp` reaches the port of its endpoint all the same."""
    files: str | None = None
    """Folder whose files each sandbox begins with."""
    files_key: str | None = None
    """Key of a row that has further files: `{path: text}`."""
    readable: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """`seccomp`: folders that commands may read and run programs from, besides the system's and Python's."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of commands; they have no others but `PATH`, `HOME` and `TMPDIR`."""
    at_once: Positive = 16
    """Maximum number of commands that run at the same time."""


DESCRIPTION = "Where `sandbox:` tools and agents run commands."
SANDBOX = AddedField("EpisodeConfig", "sandbox", SandboxConfig, SandboxConfig(), DESCRIPTION)
FIELDS = (SANDBOX,)
sandbox_of = SANDBOX.of
"""The section `sandbox` of a section `episode`."""
