"""Requests and answers as OpenAI's Responses API has them: items, not messages, and conversations that the server keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.data.told import MediaKeeper
from megarl.options.agents.messages import (
    ROLES,
    ChatRequest,
    RequestError,
    SessionMessage,
    checked_tools,
    positive,
    said_call,
    template_args,
    text_of,
    told_of,
)
from megarl.options.agents.tree import Turn

IGNORED = ("temperature", "top_p")
"""Sampling parameters: the run's are used, because the trainer's log-probs are under them."""
REFUSED = ("background", "conversation", "prompt", "top_logprobs")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")


@dataclass(frozen=True)
class ResponseRequest:
    """A request; `conversation` is what it asks about, earlier responses included, without the instructions."""

    chat: ChatRequest
    conversation: tuple[SessionMessage, ...]


def read_request(
    body: Mapping[str, Any], conversations: Mapping[str, tuple[SessionMessage, ...]], keeper: MediaKeeper | None = None
) -> ResponseRequest:
    """The request in the JSON object `body`; `conversations` are those up to earlier responses, by the ids of these.
    `keeper` keeps its pictures, None: the model takes none.

    Raises:
        RequestError: it is none, or asks for what is not done here.
    """
    for name in REFUSED:
        if body.get(name):
            raise RequestError(f"{name} is {json.dumps(body[name])[:80]}; it must be left out")
    if body.get("tool_choice") not in (None, "auto"):
        raise RequestError(f"tool_choice is {json.dumps(body['tool_choice'])[:80]}; it must be left out, or 'auto'")
    text = body.get("text")
    if isinstance(text, dict) and text.get("format") not in (None, {"type": "text"}):
        raise RequestError("text.format must be left out, or of type 'text': a grammar would change what the policy samples")
    before: tuple[SessionMessage, ...] = ()
    if (earlier := body.get("previous_response_id")) is not None:
        if not isinstance(earlier, str) or earlier not in conversations:
            raise RequestError(f"previous_response_id is {earlier!r}, which is no response of this episode", status=404)
        before = conversations[earlier]
    conversation = (*before, *_messages(body.get("input"), keeper))
    instructions = text_of(body.get("instructions"), "instructions")
    chat = ChatRequest(
        model=str(body.get("model", "")),
        messages=(*((SessionMessage("system", instructions),) if instructions else ()), *conversation),
        tools=checked_tools([_tool(tool) for tool in body.get("tools") or []]),
        max_tokens=positive(body.get("max_output_tokens"), "max_output_tokens"),
        stream=bool(body.get("stream")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
        template_args=template_args(body),
    )
    return ResponseRequest(chat, conversation)


def _tool(given: Any) -> Any:
    """A function as chat completions have it."""
    if not isinstance(given, dict) or given.get("type") != "function":
        kind = given.get("type") if isinstance(given, dict) else given
        raise RequestError(f"tools has one of type {kind!r}; it must be 'function'")
    shown = {name: given[name] for name in ("name", "description", "parameters") if given.get(name) is not None}
    return {"type": "function", "function": shown}


def _messages(given: Any, keeper: MediaKeeper | None) -> list[SessionMessage]:
    """Items as messages: what an assistant thought, said and called, one item behind the other, is one message."""
    if isinstance(given, str) and given:
        return [SessionMessage("user", given)]
    if not isinstance(given, list) or not given:
        raise RequestError("input must be text, or a list with at least one item")
    messages: list[SessionMessage] = []
    for index, item in enumerate(given):
        message = _message(item, f"input[{index}]", keeper)
        if messages and messages[-1].role == message.role == "assistant":
            first = messages.pop()
            text, calls, reasoning = (getattr(first, name) + getattr(message, name) for name in ("text", "calls", "reasoning"))
            message = replace(first, text=text, calls=calls, reasoning=reasoning)
        messages.append(message)
    return messages


def _message(item: Any, where: str, keeper: MediaKeeper | None) -> SessionMessage:
    kind = (item.get("type") or "message") if isinstance(item, dict) else None
    if kind not in ITEMS:
        raise RequestError(f"{where}.type is {kind!r}; it must be one of {', '.join(ITEMS)}")
    if kind == "reasoning":
        return SessionMessage("assistant", "", reasoning=text_of(_renamed(item.get("content") or []), where))
    if kind == "function_call_output":
        content = told_of(_renamed(item.get("output")), where, keeper)
        return SessionMessage("tool", content.text, call_id=str(item.get("call_id") or ""), pictures=content.pictures)
    if kind == "function_call":
        refusal = f"{where} must have a name, and the JSON text of an object as arguments"
        return SessionMessage("assistant", "", (said_call(item, item.get("call_id"), refusal),))
    if item.get("role") not in ROLES:
        raise RequestError(f"{where}.role is {item.get('role')!r}; it must be one of {', '.join(ROLES)}")
    content = told_of(_renamed(item.get("content")), where, keeper)
    return SessionMessage(ROLES[item["role"]], content.text, pictures=content.pictures)


def _renamed(content: Any) -> Any:
    """Content with `text` in place of `input_text`, `output_text` and `reasoning_text`."""
    if not isinstance(content, list):
        return content
    kinds = ("input_text", "output_text", "reasoning_text")
    return [{**part, "type": "text"} if isinstance(part, dict) and part.get("type") in kinds else part for part in content]


def answer(turn: Turn, given: ResponseRequest, body: Mapping[str, Any], created: int) -> dict[str, Any]:
    """The response that `turn` is to the request `given`, whose JSON is `body`."""
    is_cut = turn.generation.finish_reason != "stop"
    status = "incomplete" if is_cut else "completed"
    return {
        "id": f"resp_{turn.number}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": given.chat.max_tokens,
        "metadata": body.get("metadata") or {},
        "model": given.chat.model,
        "output": list(_items(turn, status)),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": _usage(turn),
    }


def _items(turn: Turn, status: str) -> Iterator[dict[str, Any]]:
    message = turn.said
    if message.reasoning:
        thought = [{"type": "reasoning_text", "text": message.reasoning}]
        yield {"id": f"rs_{turn.number}", "type": "reasoning", "summary": [], "content": thought, "status": status}
    if message.text or not message.calls:
        parts: list[dict[str, Any]] = [{"type": "output_text", "text": message.text, "annotations": []}]
        yield {"id": f"msg_{turn.number}", "type": "message", "role": "assistant", "status": status, "content": parts}
    for index, call in enumerate(message.calls):
        names = {"id": f"fc_{turn.number}_{index}", "type": "function_call", "call_id": call.call_id, "name": call.name}
        yield {**names, "arguments": call.arguments, "status": status}


def _usage(turn: Turn) -> dict[str, Any]:
    sampled = len(turn.generation.response_ids)
    before = len(turn.ids) - sampled
    return {
        "input_tokens": before,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": before + sampled,
    }


def events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The response `whole` as the events of a stream, in their order."""
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    inner = (event for index, item in enumerate(whole["output"]) for event in _item_events(item, index))
    stream = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *inner,
        {"type": f"response.{whole['status']}", "response": whole},
    ]
    for number, event in enumerate(stream):
        yield {**event, "sequence_number": number}


def _item_events(item: dict[str, Any], place: int) -> Iterator[dict[str, Any]]:
    where = {"output_index": place, "item_id": item["id"]}
    nothing: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    empty = {**item, "status": "in_progress", **nothing}
    yield {"type": "response.output_item.added", "output_index": place, "item": empty}
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **where, **done}
    else:
        yield from _part_events(item["content"], where)
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _part_events(parts: Sequence[dict[str, Any]], where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for index, part in enumerate(parts):
        here = {**where, "content_index": index}
        more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **here, "part": {**part, "text": ""}}
        yield {"type": f"response.{part['type']}.delta", **here, "delta": part["text"], **more}
        yield {"type": f"response.{part['type']}.done", **here, "text": part["text"], **more}
        yield {"type": "response.content_part.done", **here, "part": part}
