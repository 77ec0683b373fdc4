"""A coding agent with the public `openai` package: it has the policy write a function, runs its tests in the episode's sandbox,
and shows what went wrong until they pass.

The policy's text runs in the sandbox alone; this program only passes it on. What the last turn has written is judged by hidden
tests (the reward `code_tests`).
"""

from __future__ import annotations

import re
from typing import Any

import openai

SYSTEM = "You write Python. Answer with the whole function in one block that begins with ```python and ends with ```."
TRIES = 3
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


async def solve(task: Any) -> None:
    """Ask for the function, test it, and ask again with what the tests said."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:

        async def run(command: str, stdin: str = "") -> dict[str, Any]:
            asked = {"command": command, "stdin": stdin}
            result: dict[str, Any] = await client.post("/sandbox/run", body=asked, cast_to=dict[str, Any])
            return result

        for _ in range(TRIES):
            try:
                answer = await client.chat.completions.create(model=task.model, messages=messages)
            except openai.BadRequestError:  # no room for another turn
                return
            said = answer.choices[0].message.content or ""
            blocks = BLOCK.findall(said)
            await run("cat > solution.py", blocks[-1] if blocks else said)
            tested = await run("python3 test_solution.py")
            if tested["exit_code"] == 0:
                return
            wrong = tested["stderr"].strip().splitlines()[-1:] or [tested["ended_by"] or "it failed"]
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"The tests fail: {wrong[0][:200]} Write the whole function again."},
            ]
