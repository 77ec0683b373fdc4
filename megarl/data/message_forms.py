"""Messages in the forms in which data sets have them, as messages with `role` and `content`.

ShareGPT (`from`, `value`), OASST (`prompter`, `text`), OpenAI's older calls (`function_call`, `functions`), pairs of turns
(Capybara's `input` and `output`), and texts by turns (LIMA).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megarl.data.rows import Row, RowPlace, find_value
from megarl.errors import DataError

ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Roles by the words of messages with `from` and `value`, and of others whose role templates do not know."""
CALLS = ("function_call", "tool_call")
"""Words of messages with `from` and `value` whose value is a call, as JSON text."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which messages have what the assistant thought. Templates may leave it out of earlier turns: that is history."""
OLD_TOOLS = "functions"
"""Key of a row's tools in OpenAI's older form, where it has none under `data.tools_key`."""


def in_todays_form(value: Any, template: str = "") -> Any:
    """A list of messages, of pairs of turns or of texts as messages; what is none of these as it is.

    `template` is the source of the chat template: what the assistant thought is under the name that it reads.
    """
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(value)]
    if isinstance(value, list) and value and all(map(_is_pair_of_turns, value)):
        value = [_said(role, pair[key]) for pair in value for role, key in (("user", "input"), ("assistant", "output"))]
    return [_message(message, template) for message in value] if isinstance(value, list) else value


def _is_pair_of_turns(item: Any) -> bool:
    return isinstance(item, dict) and {"input", "output"} <= item.keys() and not item.keys() & {"role", "from", "content"}


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _message(message: Any, template: str) -> Any:
    if not isinstance(message, dict):
        return message
    if {"from", "value"} <= message.keys() and "role" not in message and str(message["from"]) in ROLES:
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        calls = _calls_in(message["value"]) if message["from"] in CALLS else None
        said = _said(ROLES[str(message["from"])], message["value"])
        message = rest | (said if calls is None else {**said, "content": "", "tool_calls": calls})
    elif "role" in message and "content" not in message and isinstance(message.get("text"), str):
        message = {("content" if key == "text" else key): value for key, value in message.items()}
    if message.get("role") in ("prompter", "human", "gpt", "function"):
        message = {**message, "role": ROLES[message["role"]]}
    if isinstance(message.get("function_call"), Mapping) and not message.get("tool_calls"):
        call = message["function_call"]
        rest = {key: value for key, value in message.items() if key != "function_call"}
        message = {**rest, "tool_calls": [{"type": "function", "function": dict(call)}]}
    return _with_reasoning(message, template)


def _with_reasoning(message: dict[str, Any], template: str) -> dict[str, Any]:
    """The message with its reasoning under the name that the template reads, if that is another one."""
    given = next((key for key in REASONING if isinstance(message.get(key), str)), None)
    read = [key for key in REASONING if re.search(rf"[.'\"]{key}(?!\w)", template)]
    if given is None or given in read or not read:
        return message
    return {(read[0] if key == given else key): value for key, value in message.items() if key not in read}


def _calls_in(value: Any) -> list[dict[str, Any]] | None:
    """The calls in the value of a message that is one (`{"name": …, "arguments": …}`, or a list of these), else None."""
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in calls]


def system_of(row: Row, key: str | None, place: RowPlace) -> str | None:
    """The row's own system message under `data.system_key`; None where it has none, or an empty one.

    Raises:
        DataError: it is no text.
    """
    system = None if key is None else find_value(row, key)
    if system is not None and not isinstance(system, str):
        raise DataError(f"{place} has {system!r:.80} under '{key}' (data.system_key); it must be text, or system_key null")
    return system if system and system.strip() else None


def with_own_system(messages: Sequence[dict[str, Any]], system: str | None, key: str | None, place: RowPlace) -> list[Any]:
    """`messages` behind the row's own system message, unless they begin with just that.

    Raises:
        DataError: they begin with another one.
    """
    if system is None or not messages:
        return list(messages)
    if messages[0]["role"] != "system":
        return [_said("system", system), *messages]
    if messages[0]["content"] != system:
        raise DataError(
            f"{place} has a system message under '{key}' (data.system_key) and another one in its messages; one of them must "
            "go, or data.system_key must be null"
        )
    return list(messages)


def as_schemas(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as JSON schemas of OpenAI's newer form; bare functions (`name`, `parameters`) are put in it."""
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool and "type" not in tool else tool
        for tool in tools
    ]
