"""Requests and answers as OpenAI's chat completions have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.rollout.sessions.messages import (
    ROLES,
    ChatRequest,
    RequestError,
    SaidCall,
    SessionMessage,
    canonical_json,
    checked_tools,
    positive,
    text_of,
)
from megarl.rollout.sessions.tree import Turn

IGNORED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias")
"""Sampling parameters: the run's are used, because the trainer's log-probs are under them."""


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """The request in the JSON object `body`.

    Raises:
        RequestError: it is none, or asks for what is not done here.
    """
    for name, only in (("n", 1), ("logprobs", False), ("top_logprobs", 0), ("tool_choice", "auto"), ("stop", [])):
        if body.get(name) not in (None, only, *(([""],) if name == "stop" else ())):
            raise RequestError(f"{name} is {json.dumps(body[name])[:80]}; it must be left out, or {json.dumps(only)}")
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise RequestError(
            "response_format must be left out, or of type 'text': a grammar would change what the policy samples"
        )
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RequestError("messages must be a list with at least one message")
    stream_options = body.get("stream_options") or {}
    most = body.get("max_completion_tokens")
    return ChatRequest(
        model=str(body.get("model", "")),
        messages=tuple(_message(message, f"messages[{place}]") for place, message in enumerate(given)),
        tools=checked_tools(body.get("tools")),
        max_tokens=positive(most if most is not None else body.get("max_tokens"), "max_tokens"),
        stream=bool(body.get("stream")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
        with_usage=bool(isinstance(stream_options, dict) and stream_options.get("include_usage")),
    )


def _message(given: Any, where: str) -> SessionMessage:
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ROLES:
        raise RequestError(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    reasoning = given.get("reasoning_content")
    return SessionMessage(
        ROLES[role],
        text_of(given.get("content"), where),
        tuple(_call(call, where) for call in given.get("tool_calls") or ()),
        reasoning if isinstance(reasoning, str) else "",
        str(given.get("tool_call_id") or ""),
        str(given.get("name") or ""),
    )


def _call(given: Any, where: str) -> SaidCall:
    function = given.get("function") if isinstance(given, dict) else None
    try:
        arguments = json.loads(function["arguments"] or "{}")  # type: ignore[index]
        if isinstance(arguments, dict):
            return SaidCall(str(function["name"]), canonical_json(arguments), str(given.get("id") or ""))  # type: ignore[index]
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise RequestError(f"{where}.tool_calls must be functions, each with a name and the JSON text of an object as arguments")


def answer(turn: Turn, model: str, created: int) -> dict[str, Any]:
    """The chat completion that `turn` is."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.said.text or None}
    if turn.said.reasoning:
        message["reasoning_content"] = turn.said.reasoning
    if turn.said.calls:
        message["tool_calls"] = [_call_form(call) for call in turn.said.calls]
    return {
        "id": f"chatcmpl-{turn.number}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": _finish_reason(turn), "logprobs": None}],
        "usage": _usage(turn),
    }


def chunks(turn: Turn, model: str, created: int, *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """The same as the chunks of a stream."""

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        begun = {"id": f"chatcmpl-{turn.number}", "object": "chat.completion.chunk", "created": created, "model": model}
        return {**begun, "choices": choices}

    yield chunk({"role": "assistant", "content": ""})
    if turn.said.reasoning:
        yield chunk({"reasoning_content": turn.said.reasoning})
    if turn.said.text:
        yield chunk({"content": turn.said.text})
    for place, call in enumerate(turn.said.calls):
        yield chunk({"tool_calls": [{"index": place, **_call_form(call)}]})
    yield chunk({}, _finish_reason(turn))
    if with_usage:
        yield {**chunk({}), "choices": [], "usage": _usage(turn)}


def error(message: str, code: str) -> dict[str, Any]:
    """An error."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _call_form(call: SaidCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(turn: Turn) -> str:
    if turn.generation.finish_reason != "stop":
        return "length"
    return "tool_calls" if turn.said.calls else "stop"


def _usage(turn: Turn) -> dict[str, int]:
    sampled = len(turn.generation.response_ids)
    before = len(turn.ids) - sampled
    return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}
