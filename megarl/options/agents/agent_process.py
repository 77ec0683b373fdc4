"""The program of a process in which a user's agent acts, in several episodes at once if it is an `async def`. Run by path.

In: lines of JSON, first `{"path": sys.path, or null for its own, "megarl": where megarl lies, "function": import path}`, then
`{"number", "task"}` or `{"cancel": number}`. Out: `{"number": -1}` when it is ready, and for each number once `{"number",
"reward", "failed", "why"}`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import sys
from typing import Any


async def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an agent prints must not look like an answer
    lines = await _input()
    setting = json.loads(await lines.readline())
    if setting["path"] is not None:
        sys.path[:] = setting["path"]
    else:  # a Python with packages of its own
        sys.path.append(setting["megarl"])
    from megarl.errors import EpisodeError
    from megarl.options.agents.task import AgentTask
    from megarl.system.user_code import describe, load_user_function

    function = load_user_function(setting["function"], EpisodeError)

    async def serve(number: int, task: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": number, "reward": None, "failed": False, "why": "it ended without an error"}
        try:
            agent_task = AgentTask(**task)
            returned = await (
                function(agent_task) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, agent_task)
            )
            if returned is not None:
                answer["reward"] = float(returned)
                if not math.isfinite(answer["reward"]):
                    raise ValueError(f"it returned {returned}; a reward must be a finite number, or None")
        except asyncio.CancelledError:
            answer |= {"failed": True, "why": "it was ended"}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whoever asked is told
            answer |= {"reward": None, "failed": True, "why": describe(error)}
        print(json.dumps(answer), file=answers, flush=True)

    print(json.dumps({"number": -1}), file=answers, flush=True)
    running: dict[int, asyncio.Task[None]] = {}
    while line := await lines.readline():
        request = json.loads(line)
        if "cancel" in request:
            if request["cancel"] in running:
                running[request["cancel"]].cancel()
            continue
        number = request["number"]
        running[number] = asyncio.create_task(serve(number, request["task"]))
        running[number].add_done_callback(lambda _, done=number: running.pop(done, None))  # type: ignore[misc]


async def _input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return reader


if __name__ == "__main__":
    asyncio.run(main())
