"""Requests and answers as OpenAI's chat completions have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.data.told import MediaKeeper
from megarl.options.agents.messages import (
    ROLES,
    ChatRequest,
    RequestError,
    SaidCall,
    SessionMessage,
    checked_tools,
    positive,
    said_call,
    stop_strings,
    template_args,
    told_of,
)
from megarl.options.agents.stops import Stops
from megarl.options.agents.tree import Turn

IGNORED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias")
"""Sampling parameters: the run's are used, because the trainer's log-probs are under them."""


def read_request(body: Mapping[str, Any], keeper: MediaKeeper | None = None) -> ChatRequest:
    """The request in the JSON object `body`; `keeper` keeps its pictures, None: the model takes none.

    Raises:
        RequestError: it is none, or asks for what is not done here.
    """
    if body.get("tool_choice") not in (None, "auto"):
        raise RequestError(f"tool_choice is {json.dumps(body['tool_choice'])[:80]}; it must be left out, or 'auto'")
    if body.get("top_logprobs") not in (None, 0):
        raise RequestError("top_logprobs must be left out, or 0: the sampler has the log-probs of sampled tokens alone")
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise RequestError(
            "response_format must be left out, or of type 'text': a grammar would change what the policy samples"
        )
    raw_messages = body.get("messages")
    if not isinstance(raw_messages, list) or not raw_messages:
        raise RequestError("messages must be a list with at least one message")
    stream_options = body.get("stream_options") or {}
    most = body.get("max_completion_tokens")
    return ChatRequest(
        model=str(body.get("model", "")),
        messages=tuple(_message(message, f"messages[{index}]", keeper) for index, message in enumerate(raw_messages)),
        tools=checked_tools(body.get("tools")),
        max_tokens=positive(most if most is not None else body.get("max_tokens"), "max_tokens"),
        stream=bool(body.get("stream")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
        with_usage=bool(isinstance(stream_options, dict) and stream_options.get("include_usage")),
        count=positive(body.get("n"), "n") or 1,
        stops=Stops(stop_strings(body.get("stop"), "stop"), _token_ids(body.get("stop_token_ids"))),
        log_probs=bool(body.get("logprobs")),
        template_args=template_args(body),
    )


def _token_ids(given: Any) -> tuple[int, ...]:
    if not isinstance(given or [], list) or not all(isinstance(token, int) for token in given or []):
        raise RequestError("stop_token_ids must be a list of token ids")
    return tuple(given or [])


def _message(given: Any, where: str, keeper: MediaKeeper | None) -> SessionMessage:
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ROLES:
        raise RequestError(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    reasoning, content = given.get("reasoning_content"), told_of(given.get("content"), where, keeper)
    return SessionMessage(
        ROLES[role],
        content.text,
        tuple(_call(call, where) for call in given.get("tool_calls") or ()),
        reasoning if isinstance(reasoning, str) else "",
        str(given.get("tool_call_id") or ""),
        str(given.get("name") or ""),
        content.pictures,
    )


def _call(given: Any, where: str) -> SaidCall:
    function, call_id = (given.get("function"), given.get("id")) if isinstance(given, dict) else (None, None)
    refusal = f"{where}.tool_calls must be functions, each with a name and the JSON text of an object as arguments"
    return said_call(function, call_id, refusal)


def answer(turns: Sequence[Turn], model: str, created: int) -> dict[str, Any]:
    """The chat completion whose choices `turns` are, all behind the same tokens."""
    return {
        "id": f"chatcmpl-{turns[0].number}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice(turn, index) for index, turn in enumerate(turns)],
        "usage": _usage(turns),
    }


def _choice(turn: Turn, index: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.said.text or None}
    if turn.said.reasoning:
        message["reasoning_content"] = turn.said.reasoning
    if turn.said.calls:
        message["tool_calls"] = [_call_form(call) for call in turn.said.calls]
    return {"index": index, "message": message, "finish_reason": _finish_reason(turn), "logprobs": _log_probs(turn)}


def chunks(turns: Sequence[Turn], model: str, created: int, *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """The same as the chunks of a stream."""
    begun = {"id": f"chatcmpl-{turns[0].number}", "object": "chat.completion.chunk", "created": created, "model": model}
    for index, turn in enumerate(turns):
        for choice in _deltas(turn):
            yield {**begun, "choices": [{"index": index, "finish_reason": None, **choice}]}
    if with_usage:
        yield {**begun, "choices": [], "usage": _usage(turns)}


def _deltas(turn: Turn) -> Iterator[dict[str, Any]]:
    yield {"delta": {"role": "assistant", "content": ""}, "logprobs": _log_probs(turn)}
    if turn.said.reasoning:
        yield {"delta": {"reasoning_content": turn.said.reasoning}}
    if turn.said.text:
        yield {"delta": {"content": turn.said.text}}
    for index, call in enumerate(turn.said.calls):
        yield {"delta": {"tool_calls": [{"index": index, **_call_form(call)}]}}
    yield {"delta": {}, "finish_reason": _finish_reason(turn)}


def _log_probs(turn: Turn) -> dict[str, Any] | None:
    """Log-probs of every sampled token, thoughts and calls included; None: nobody has asked for them."""
    if not turn.token_texts:
        return None
    sampled = zip(turn.token_texts, turn.generation.log_probs, strict=True)
    return {
        "content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in sampled],
        "refusal": None,
    }


def error(message: str, code: str) -> dict[str, Any]:
    """An error."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def _call_form(call: SaidCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(turn: Turn) -> str:
    if turn.generation.finish_reason != "stop":
        return "length"
    return "tool_calls" if turn.said.calls else "stop"


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    before = len(turns[0].ids) - len(turns[0].generation.response_ids)
    sampled = sum(len(turn.generation.response_ids) for turn in turns)
    return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}
