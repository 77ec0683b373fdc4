"""`sandbox:bash`, `sandbox:python`, `sandbox:write_file` and `sandbox:read_file`: tools that work in the episode's sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from megarl.errors import EpisodeError, nearest
from megarl.options.tools.answers import ToolAnswer, late
from megarl.options.tools.toolbox import CallTool
from megarl.rollout.episodes.commands import CommandFolder, CommandFolders, CommandResult

PREFIX = "sandbox:"
_WRITE = 'mkdir -p "$(dirname -- "$0")" && cat > "$0"'


def _schema(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SCHEMAS = {
    "bash": _schema(
        "bash",
        "Run a shell command in the working folder. Files stay between calls; processes and variables do not.",
        command="the command, such as ls -la",
    ),
    "python": _schema("python", "Run a Python program in the working folder. Print what you want to see.", code="the program"),
    "write_file": _schema(
        "write_file", "Write a text file in the working folder, in place of what it had.",
        path="where, such as src/main.py", content="all of its text",
    ),
    "read_file": _schema("read_file", "Read a text file.", path="where, such as src/main.py"),
}  # fmt: skip
"""By name, as the chat template's `tools=` takes them."""


class SandboxTools:
    """A `ToolSource`; an episode's sandbox is opened when a tool is first called."""

    def __init__(self, names: Sequence[str], sandboxes: CommandFolders) -> None:
        """`names` with their prefix.

        Raises:
            EpisodeError: there is no such tool.
        """
        self._sandboxes = sandboxes
        self.schemas: list[dict[str, Any]] = []
        for name in names:
            bare = name.removeprefix(PREFIX)
            if bare not in SCHEMAS:
                known = ", ".join(PREFIX + known for known in SCHEMAS)
                raise EpisodeError(f"rollout.episode.tools has '{name}'{nearest(bare, SCHEMAS)}; of these there are {known}")
            self.schemas.append(SCHEMAS[bare])

    @contextlib.asynccontextmanager
    async def begun(self, row: Mapping[str, Any]) -> AsyncIterator[CallTool]:
        """The tools in a sandbox of the episode's own."""
        opened: list[CommandFolder] = []
        opening = asyncio.Lock()

        async def call(name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
            required = SCHEMAS[name]["function"]["parameters"]["required"]
            if sorted(arguments) != sorted(required) or not all(isinstance(value, str) for value in arguments.values()):
                return ToolAnswer.whole(
                    f"error: {name}: it takes the texts {', '.join(required)}, no more and no less", "tool_errors"
                )
            async with opening:
                if not opened:
                    opened.append(await self._sandboxes.open(row))
            result = await _run(opened[0], name, arguments)
            if result.ended_by == "time":
                return late(name, self._sandboxes.settings.timeout_s)
            return ToolAnswer.whole(result.told() or "[no output]")

        try:
            yield call
        finally:
            for sandbox in opened:
                await self._sandboxes.closed(sandbox)

    def close(self) -> None:
        """End the sandboxes that are open."""
        self._sandboxes.close()


async def _run(sandbox: CommandFolder, name: str, arguments: Mapping[str, str]) -> CommandResult:
    if name == "bash":
        return await sandbox.run(arguments["command"])
    if name == "python":
        return await sandbox.run(["python3", "-"], stdin=arguments["code"])
    if name == "write_file":
        return await sandbox.run(["sh", "-c", _WRITE, arguments["path"]], stdin=arguments["content"])
    return await sandbox.run(["cat", "--", arguments["path"]])
