"""Folders in which tools and agents run commands: a folder for each episode, whoever confines what happens in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class CommandResult:
    """The end of a command. `exit_code` is minus the signal that ended it, 127 where it did not start.

    `ended_by` is what it used too much of (`time`, `memory`, `processes`, `disk`, `output`) or empty; `is_cut`: it printed more
    than is kept.
    """

    exit_code: int
    stdout: str
    stderr: str
    ended_by: str = ""
    is_cut: bool = False

    def told(self) -> str:
        """All of it as one text."""
        parts = [self.stdout, self.stderr and f"[errors]\n{self.stderr}", "[the rest of the output was cut]" * self.is_cut]
        if self.ended_by:
            parts.append(f"[ended: it used too much {self.ended_by}]")
        elif self.exit_code:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join(part.rstrip("\n") for part in parts if part)


class CommandFolder(Protocol):
    """The folder of one episode."""

    async def run(
        self,
        command: str | Sequence[str],
        stdin: str = "",
        timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command in the folder and tell how it ended."""
        ...


class CommandFolders(Protocol):
    """The folders of a run's episodes."""

    settings: Any
    """The section of the config; `timeout_s` is the limit of one command."""

    async def open(self, row: Mapping[str, Any]) -> Any:
        """A folder for an episode on `row`."""
        ...

    def opened(self, row: Mapping[str, Any]) -> AbstractAsyncContextManager[Any]:
        """A folder for as long as the block."""
        ...

    async def closed(self, sandbox: Any) -> None:
        """Close a folder that `open` gave."""
        ...

    def close(self) -> None:
        """End all that runs in the folders."""
        ...
