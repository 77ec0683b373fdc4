"""An agent that knows nothing of megarl: a plain program with the public `openai` package, which calls a calculator if asked
to.

The same code would work against any server of chat completions. `examples/agents/calculator.yaml` trains the policy behind it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from calculator import calculator

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Compute an arithmetic expression of whole numbers with + - * and brackets.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "what to compute, such as 12*7"}},
                "required": ["expression"],
            },
        },
    }
]
CLIENTS: dict[str, openai.AsyncOpenAI] = {}


async def solve(task: Any) -> None:
    """Ask for the next message, and answer its calls, until there are none."""
    if task.base_url not in CLIENTS:  # one for all episodes: making a client takes longer than asking for a turn
        CLIENTS[task.base_url] = openai.AsyncOpenAI(base_url=task.base_url, api_key="each episode has its own")
    client = CLIENTS[task.base_url].with_options(api_key=task.api_key)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for _ in range(3):
        answer = await client.chat.completions.create(model=task.model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            try:
                result = calculator(**json.loads(call.function.arguments))
            except (TypeError, ValueError, SyntaxError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
