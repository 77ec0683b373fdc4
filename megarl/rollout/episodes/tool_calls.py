"""One turn of a policy: what it thought, what it said, and which tools it calls, whatever format its family writes.

| family | a call |
|---|---|
| Hermes, Qwen | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |
| Qwen coder, Qwen3.5 | `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` |
| GLM | `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` |
| DeepSeek-V3, V3.1 | between `<｜tool▁call▁begin｜>`, `<｜tool▁sep｜>` and `<｜tool▁call▁end｜>` |
| Kimi-K2 | between `<|tool_call_begin|>`, `<|tool_call_argument_begin|>` and `<|tool_call_end|>` |
| gpt-oss | `<|channel|>commentary to=functions.name … <|message|>{…}` |
| Mistral | `[TOOL_CALLS][{…}]`, or `[TOOL_CALLS]name[ARGS]{…}` |
| Llama 3, any | a turn that is nothing but the JSON of a call, or of a list of them |

The formats have no mark in common, so the turn itself says which one it is. A call in JSON is an object with `name` and
`arguments` (also `parameters`, as Llama 3 says), or OpenAI's `{"type": "function", "function": {…}}` around it; `arguments`
may be an object or, as OpenAI sends it, its JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""Schemas as OpenAI has them; values that a format writes without types get theirs by these."""


@dataclass(frozen=True)
class ToolCall:
    """One call; `problem` says what is wrong with one that cannot be made."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class SaidTurn:
    """A turn in its parts. `text` is what stands before the first call."""

    reasoning: str
    text: str
    calls: list[ToolCall]


def parse_turn(said: str, tools: Tools = ()) -> SaidTurn:
    """A turn of the policy, without the token that ended it, in its parts. Thoughts are not read for calls. Never raises."""
    if "<|channel|>" in said:
        return _harmony(said)
    thought, closed, answer = said.rpartition("</think>")
    if not closed and said.lstrip().startswith("<think>"):  # it was cut while it thought
        thought, answer = said, ""
    thought = thought.strip().removeprefix("<think>").strip()
    matches = [(answer.find(mark), mark, read) for mark, read in _FORMATS if mark in answer]
    if matches:
        at, _, read = min(matches, key=lambda one: one[0])
        return SaidTurn(thought, answer[:at].strip(), list(read(answer[at:], tools)))
    calls = _plain_json(answer)
    return SaidTurn(thought, "" if calls else answer.strip(), calls)


def parse_tool_calls(said: str, tools: Tools = ()) -> list[ToolCall]:
    """The calls in one turn of the policy, in order; none where the turn is an answer.

    A mark that begins no call gives one with a `problem`, so that the policy is told. Text without marks is a call only if all
    of it is JSON of one, or a list of them. Never raises.
    """
    return parse_turn(said, tools).calls


# the formats -----------------------------------------------------------------------------------------------------------


def _bodies(said: str, begin: str, end: str) -> Iterator[str]:
    """The texts between the marks, one after the other; the last one may have no end.

    Found by looking ahead once. A pattern would look to the end of the turn again from each mark, and a policy that writes
    thousands of marks without ends would stop the run.
    """
    at = said.find(begin)
    while at >= 0:
        start = at + len(begin)
        stop = said.find(end, start)
        yield said[start:stop] if stop >= 0 else said[start:]
        at = said.find(begin, stop + len(end)) if stop >= 0 else -1


def _tagged(said: str, tools: Tools) -> Iterable[ToolCall]:
    for body in _bodies(said, "<tool_call>", "</tool_call>"):
        if "<function=" in body:
            yield from _functions(body, tools)
        elif "<arg_key>" in body or _NAME.fullmatch(body.strip()):
            yield _untyped(body.partition("<arg_key>")[0].strip(), _key_values(body), tools)
        else:
            yield from _json_calls(body, "what is inside <tool_call>")


_NAME = re.compile(r"[A-Za-z_][\w.-]*")


def _key_values(body: str) -> Iterator[tuple[str, str]]:
    """GLM's pairs; a key that no value follows is none."""
    for part in body.split("<arg_key>")[1:]:
        key, closed, rest = part.partition("</arg_key>")
        between, _, value = rest.partition("<arg_value>")
        value, ended, _rest = value.partition("</arg_value>")
        if closed and ended and not between.strip():
            yield key, value


def _functions(body: str, tools: Tools) -> Iterable[ToolCall]:
    mark, end = "<function=", "</function>"
    at, close = body.find(mark), -1
    while at >= 0:
        start = at + len(mark)
        if close < start and (close := body.find(">", start)) < 0:
            return
        if (line_end := body.find("\n", start, close)) >= 0:  # no name
            at = body.find(mark, line_end)
            continue
        stop = body.find(end, close)
        rest = body[close + 1 : stop] if stop >= 0 else body[close + 1 :]
        yield _untyped(body[start:close].strip(), _parameters(rest), tools)
        at = body.find(mark, stop + len(end)) if stop >= 0 else -1


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    """Qwen coder's pairs; a value ends at its mark, at the next parameter or with the call."""
    for part in body.split("<parameter=")[1:]:
        key, closed, value = part.partition(">")
        if closed and "\n" not in key:
            yield key, value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")


def _deepseek(said: str, tools: Tools) -> Iterable[ToolCall]:
    for body in _bodies(said, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        before, _, after = body.partition("<｜tool▁sep｜>")
        if before.strip() == "function":  # V3: the word, then the name and a block of code
            name, _, block = after.partition("\n")
            after = block.strip().removeprefix("```json").removesuffix("```")
        else:
            name = before
        yield _with_arguments(name.strip(), after)


def _kimi(said: str, tools: Tools) -> Iterable[ToolCall]:
    for body in _bodies(said, "<|tool_call_begin|>", "<|tool_call_end|>"):
        name, _, arguments = body.partition("<|tool_call_argument_begin|>")
        yield _with_arguments(name.strip().removeprefix("functions.").rpartition(":")[0], arguments)


def _mistral(said: str, tools: Tools) -> Iterable[ToolCall]:
    for body in said.split("[TOOL_CALLS]")[1:]:
        name, compact, arguments = body.partition("[ARGS]")
        if compact:
            yield _with_arguments(name.strip(), arguments)
        else:
            yield from _json_calls(body, "what follows [TOOL_CALLS]")


def _harmony(said: str) -> SaidTurn:
    """gpt-oss: messages that each name their channel, thoughts in `analysis`, the answer in `final`."""
    thoughts, texts, calls = [], [], []
    for message in re.split(r"<\|start\|>", said):
        head, _, body = message.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body)[0]
        called = re.search(r"to=([\w.-]+)", head)
        channel = re.search(r"<\|channel\|>\s*(\w+)", head)
        if called is not None:
            calls.append(_with_arguments(called[1].removeprefix("functions."), body))
        elif channel is not None and channel[1] == "analysis":
            thoughts.append(body.strip())
        else:
            texts.append(body.strip())
    return SaidTurn("\n".join(thoughts), "\n".join(filter(None, texts)), calls)


def _plain_json(said: str) -> list[ToolCall]:
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return []
    calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
    return [] if any(call.problem for call in calls) else calls


_FORMATS: tuple[tuple[str, Callable[[str, Tools], Iterable[ToolCall]]], ...] = (
    ("<tool_call>", _tagged),
    ("<function=", _functions),
    ("<｜tool▁call", _deepseek),
    ("<|tool_call", _kimi),
    ("[TOOL_CALLS]", _mistral),
)


# one call --------------------------------------------------------------------------------------------------------------


def _json_calls(text: str, where: str) -> list[ToolCall]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", problem=f"{where} is not valid JSON: {error}")]
    return [_call(item) for item in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not ("arguments" in value or "parameters" in value):
        return ToolCall("", problem="a tool call is a JSON object with 'name' and 'arguments'")
    return _with_arguments(name, value.get("arguments", value.get("parameters")))


def _with_arguments(name: str, arguments: Any) -> ToolCall:
    if not name:
        return ToolCall("", problem="the call names no function")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"the arguments are a {type(arguments).__name__}, but they must be a JSON object")
    return ToolCall(name, arguments)


def _untyped(name: str, pairs: Iterable[tuple[str, str]], tools: Tools) -> ToolCall:
    """A call whose arguments are written as text: what the schema calls a string stays one, anything else is read as JSON."""
    if not name:
        return ToolCall("", problem="the call names no function")
    types = _types_of_arguments(name, tools)
    arguments: dict[str, Any] = {}
    for key, text in ((key.strip(), text) for key, text in pairs):
        try:
            arguments[key] = text if types.get(key, "string") == "string" else json.loads(text)
        except (ValueError, RecursionError):
            arguments[key] = text
    return ToolCall(name, arguments)


def _types_of_arguments(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type", "any") for key, schema in properties.items() if isinstance(schema, dict)}
    return {}
