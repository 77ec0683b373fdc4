"""The program of a process in which a user's agent acts, in several episodes at once if it is an `async def`. Run by path.

In: lines of JSON, first `{"path": sys.path, or null for its own, "megarl": where megarl lies, "function": import path}`, then
`{"number", "task"}` or `{"cancel": number}`. Out: `{"number": -1}` when it is ready, and for each number `{"number", "reward",
"failed", "why"}` when its function has ended, and once more if it is cancelled after that.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import sys
from functools import partial
from typing import Any

ENDED = {"reward": None, "failed": True, "why": "it was ended"}


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

    async def serve(task: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"reward": None, "failed": False, "why": "it ended without an error"}
        try:
            agent_task = AgentTask(**task)
            returned = await (
                function(agent_task) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, agent_task)
            )
            if returned is not None:
                answer["reward"] = float(returned)
                if not math.isfinite(answer["reward"]):
                    raise ValueError(f"it returned {returned}; a reward must be a finite number, or None")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whoever asked is told
            answer |= {"reward": None, "failed": True, "why": describe(error)}
        return answer

    def tell(number: int, answer: dict[str, Any]) -> None:
        print(json.dumps({"number": number, **answer}), file=answers, flush=True)

    def end(number: int, task: asyncio.Task[dict[str, Any]]) -> None:
        del running[number]
        tell(number, ENDED if task.cancelled() else task.result())

    tell(-1, {})
    running: dict[int, asyncio.Task[dict[str, Any]]] = {}
    while line := await lines.readline():
        request = json.loads(line)
        if "cancel" not in request:
            number = request["number"]
            running[number] = asyncio.create_task(serve(request["task"]))
            running[number].add_done_callback(partial(end, number))  # also of one that is cancelled before its first step
        elif request["cancel"] in running:
            running[request["cancel"]].cancel()
        else:  # its answer and this have crossed
            tell(request["cancel"], ENDED)


async def _input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return reader


if __name__ == "__main__":
    asyncio.run(main())
