"""The tool calls in what a policy said: `<tool_call>{json}</tool_call>` (Hermes, Qwen), or a turn that is nothing but JSON.

A call is a JSON object with `name` and `arguments` (also `parameters`, as Llama 3 says), or OpenAI's
`{"type": "function", "function": {…}}` around it; `arguments` may be an object or, as OpenAI sends it, its JSON text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call; `problem` says what is wrong with one that cannot be made."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in one turn of the policy, in order; none where the turn is an answer. What it thought before is not read.

    A tag that holds no call gives one with a `problem`, so that the policy is told. Text without tags is a call only if all
    of it is JSON of one, or a list of them. Never raises.
    """
    said = text.rpartition("</think>")[2]
    if "<tool_call>" in said:
        return [call for body in _TAGGED.findall(said) for call in _tagged(body)]
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return []
    calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
    return [] if any(call.problem for call in calls) else calls


def _tagged(body: str) -> list[ToolCall]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", problem=f"what is inside <tool_call> is not valid JSON: {error}")]
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not ("arguments" in value or "parameters" in value):
        return ToolCall("", problem="a tool call is a JSON object with 'name' and 'arguments'")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"the arguments are a {type(arguments).__name__}, but they must be a JSON object")
    return ToolCall(name, arguments)
