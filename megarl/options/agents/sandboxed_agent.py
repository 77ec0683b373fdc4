"""Runs an agent's command in the sandbox of its episode: all that it does, and all that it starts, stays in there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from megarl.options.agents.agents import LAST_WORDS, AgentEnd, endpoint_variables, filled
from megarl.options.agents.task import AgentTask
from megarl.rollout.episodes.commands import CommandFolders


class SandboxedAgent:
    """A command line as `CommandAgent` has it; its folder, and what it may reach, are the sandbox's."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], sandboxes: CommandFolders, timeout_s: float
    ) -> None:
        """`timeout_s`: of a whole episode."""
        self.name = f"the agent {command[0]}"
        self._command, self._environment = list(command), dict(environment)
        self._sandboxes, self._timeout_s = sandboxes, timeout_s

    async def get_ready(self) -> None:
        pass

    async def run(self, task: AgentTask) -> AgentEnd:
        environment = {**endpoint_variables(task), **self._environment}
        question = json.dumps(task.to_json())
        async with self._sandboxes.opened(task.row) as sandbox:
            result = await sandbox.run(filled(self._command, task), question, self._timeout_s, environment)
        if result.ended_by == "time":
            return AgentEnd(was_ended=True, why=f"it did not end within {self._timeout_s:g} s")
        if result.ended_by or result.exit_code:
            return AgentEnd(failed=True, why=f"it failed in its sandbox: {result.told()[-LAST_WORDS:]}")
        return AgentEnd()

    def close(self) -> None:
        self._sandboxes.close()
