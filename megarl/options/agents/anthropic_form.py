"""Requests and answers as Anthropic's messages have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.data.told import MediaKeeper
from megarl.options.agents.messages import (
    ChatRequest,
    RequestError,
    SaidCall,
    SessionMessage,
    as_json,
    checked_tools,
    positive,
    stop_strings,
    template_args,
    text_of,
    told_of,
)
from megarl.options.agents.stops import Stops
from megarl.options.agents.tree import Turn

IGNORED = ("temperature", "top_p", "top_k")
"""Sampling parameters: the run's are used, because the trainer's log-probs are under them."""


def read_request(body: Mapping[str, Any], keeper: MediaKeeper | None = None) -> ChatRequest:
    """The request in the JSON object `body`; `keeper` keeps its pictures, None: the model takes none.

    Raises:
        RequestError: it is none, or asks for what is not done here.
    """
    if (body.get("tool_choice") or {"type": "auto"}).get("type") != "auto":
        raise RequestError("tool_choice must be left out, or of type 'auto'")
    raw_messages = body.get("messages")
    if not isinstance(raw_messages, list) or not raw_messages:
        raise RequestError("messages must be a list with at least one message")
    system = text_of(body.get("system"), "system")
    messages = [SessionMessage("system", system)] if system else []
    for index, message in enumerate(raw_messages):
        messages += _messages(message, f"messages[{index}]", keeper)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        if isinstance(tool, dict)
        else tool
        for tool in body.get("tools") or []
    ]
    return ChatRequest(
        model=str(body.get("model", "")),
        messages=tuple(messages),
        tools=checked_tools(tools),
        max_tokens=positive(body.get("max_tokens"), "max_tokens"),
        stream=bool(body.get("stream")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
        stops=Stops(stop_strings(body.get("stop_sequences"), "stop_sequences")),
        template_args=template_args(body),
    )


def _messages(given: Any, where: str, keeper: MediaKeeper | None) -> list[SessionMessage]:
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ("user", "assistant"):
        raise RequestError(f"{where}.role is {role!r}; it must be user or assistant")
    content = given.get("content")
    if isinstance(content, str):
        return [SessionMessage(role, content)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content must be text or a list of blocks")
    by_type: dict[str, list[dict[str, Any]]] = {}
    for block in content:
        by_type.setdefault(str(block.get("type")), []).append(block)
    allowed = {"user": ("text", "image", "tool_result"), "assistant": ("text", "tool_use", "thinking", "redacted_thinking")}[
        role
    ]
    if other := by_type.keys() - set(allowed):
        raise RequestError(f"{where}.content has a block of type '{min(other)}'; it must be one of {', '.join(allowed)}")
    if role == "assistant":
        reasoning = "".join(str(block.get("thinking", "")) for block in by_type.get("thinking", ()))
        text, calls = text_of(by_type.get("text"), where), tuple(_call(block, where) for block in by_type.get("tool_use", ()))
        return [SessionMessage(role, text, calls, reasoning)]
    results = [(block, told_of(block.get("content"), where, keeper)) for block in by_type.get("tool_result", ())]
    answers = [
        SessionMessage("tool", result.text, call_id=str(block.get("tool_use_id", "")), pictures=result.pictures)
        for block, result in results
    ]
    rest = told_of([block for block in content if block.get("type") != "tool_result"], where, keeper)
    return [*answers, SessionMessage(role, rest.text, pictures=rest.pictures)] if rest.pieces or not answers else answers


def _call(block: Mapping[str, Any], where: str) -> SaidCall:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise RequestError(f"{where}.content has a tool_use without a name, or whose input is no object")
    return SaidCall(name, as_json(arguments), str(block.get("id", "")))


def answer(turn: Turn, model: str) -> dict[str, Any]:
    """The message that `turn` is."""
    return {
        "id": f"msg_{turn.number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(_blocks(turn)),
        "stop_reason": _stop_reason(turn),
        "stop_sequence": turn.stopped_by,
        "usage": _usage(turn),
    }


def events(turn: Turn, model: str) -> Iterator[dict[str, Any]]:
    """The same as the events of a stream."""
    whole = answer(turn, model)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**_usage(turn), "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(whole["content"]):
        empty, delta = _as_delta(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def error(message: str, code: str) -> dict[str, Any]:
    """An error."""
    kind = {"model_not_found": "not_found_error", "no_such_key": "authentication_error"}.get(code, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _blocks(turn: Turn) -> Iterator[dict[str, Any]]:
    message = turn.said
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": ""}
    if message.text or not message.calls:
        yield {"type": "text", "text": message.text}
    for call in message.calls:
        yield {"type": "tool_use", "id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}


def _as_delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    key = block["type"]
    return {**block, key: ""}, {"type": f"{key}_delta", key: block[key]}


def _stop_reason(turn: Turn) -> str:
    if turn.generation.finish_reason != "stop":
        return "max_tokens"
    if turn.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if turn.said.calls else "end_turn"


def _usage(turn: Turn) -> dict[str, int]:
    sampled = len(turn.generation.response_ids)
    return {"input_tokens": len(turn.ids) - sampled, "output_tokens": sampled}
