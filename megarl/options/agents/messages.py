"""Chat messages as clients send them, in one form whatever protocol they came by, and when two of them are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.data.told import KeptPicture, MediaKeeper, PicturedText, Shown
from megarl.errors import PictureError
from megarl.options.agents.stops import Stops

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that a request may have, and what the chat template is told of them."""


MOST_STOPS = 16
"""Stop strings in one request."""


class RequestError(Exception):
    """A request that is answered with an error: `status` is HTTP's, `code` OpenAI's, the text one sentence for the client."""

    def __init__(self, message: str, code: str = "invalid_request_error", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class SaidCall:
    """A call of a tool in an assistant's message; `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    call_id: str = ""

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"type": "function", "function": function, **({"id": self.call_id} if self.call_id else {})}

    @property
    def meaning(self) -> tuple[str, Any]:
        """Equal for calls that do the same."""
        return self.name, json.loads(self.arguments)


@dataclass(frozen=True)
class SessionMessage:
    """One message. `reasoning` is what an assistant thought before `text`, where the protocol keeps them apart."""

    role: str
    text: str
    calls: tuple[SaidCall, ...] = ()
    reasoning: str = ""
    call_id: str = ""
    """Id of the call that a tool's message answers."""
    name: str = ""
    pictures: tuple[tuple[int, KeptPicture], ...] = ()
    """Pictures in `text`, each before the character with its number."""

    def is_same(self, other: SessionMessage) -> bool:
        """Return whether a client that was told one of them says it again by the other.

        Thoughts are not compared, because most clients drop them, nor are ids of calls, nor white space at the ends of what an
        assistant said, which many clients take off.
        """
        text, other_text = (self.text, other.text) if self.role != "assistant" else (self.text.strip(), other.text.strip())
        same_calls = [call.meaning for call in self.calls] == [call.meaning for call in other.calls]
        return (self.role, text, self.pictures) == (other.role, other_text, other.pictures) and same_calls

    def for_template(self, tool_name: str = "tool") -> dict[str, Any]:
        """The message as a chat template takes it. `tool_name` is that of a tool's message without one."""
        message: dict[str, Any] = {"role": self.role, "content": PicturedText(self.text, self.pictures)}
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.role == "tool":
            message |= {"tool_call_id": self.call_id, **({"name": name} if (name := self.name or tool_name) else {})}
        return message

    def for_readers(self, media_folder: Path) -> dict[str, Any]:
        """The message as `Sample.turns` has it: pictures by the paths of their files in `media_folder`."""
        content = PicturedText(self.text, self.pictures).content(media_folder)
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.calls:
            message["tool_calls"] = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in self.calls]
        return message


def said_call(function: Any, call_id: Any, refusal: str) -> SaidCall:
    """The call `{"name", "arguments"}` in an assistant's message, with the JSON text of an object as arguments.

    Raises:
        RequestError: it is none; `refusal` says so.
    """
    try:
        arguments = json.loads(function["arguments"] or "{}")
        if isinstance(arguments, dict):
            return SaidCall(str(function["name"]), as_json(arguments), str(call_id or ""))
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise RequestError(refusal)


def as_json(arguments: Mapping[str, Any]) -> str:
    """The JSON text of a call's arguments, in the order in which they were given: a chat template writes them in it."""
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class ChatRequest:
    """The request of a client: the next message after `messages`, with `tools` on offer, in at most `max_tokens` tokens.

    `tools` are OpenAI's `{"type": "function", "function": {…}}`. `ignored` are fields that were given and change nothing.
    """

    model: str
    messages: tuple[SessionMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    ignored: tuple[str, ...] = ()
    with_usage: bool = False
    """Whether a stream ends with the number of tokens."""
    count: int = 1
    """Answers that are wanted."""
    stops: Stops = field(default_factory=Stops)
    is_retry: bool = False
    """Whether the client says that it has asked before, and has got no answer."""
    log_probs: bool = False
    """Whether the client wants those of the sampled tokens."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template, which go before those of the row and of the run."""

    @property
    def tools_key(self) -> str:
        """Equal for equal tools and options of the template, both of which may change what is written before the messages."""
        told = [self.tools, self.template_args] if self.template_args else self.tools
        return json.dumps(told, sort_keys=True)


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, nothing, or parts of type text.

    Raises:
        RequestError: there is something else in it.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise RequestError(
        f"{where}.content must be text, or a list of parts of type 'text'; files are not taken, nor pictures in this place"
    )


PICTURES = ("image_url", "input_image", "image")
"""Types of parts that are pictures: of chat completions, of responses, and of Anthropic's messages."""


def told_of(content: Any, where: str, keeper: MediaKeeper | None) -> PicturedText:
    """The text of a message's content, with the pictures in it, which `keeper` keeps.

    Raises:
        RequestError: there is something else in it, or a picture that the model does not take.
    """
    if not isinstance(content, Sequence) or not any(map(_is_picture, content)):
        return PicturedText(text_of(content, where))
    if keeper is None:
        raise RequestError(f"{where}.content has a picture, but the model takes none")
    pieces = [Shown(_data_url(part, where)) if _is_picture(part) else text_of([part], where) for part in content]
    try:
        return keeper.kept(pieces)
    except PictureError as error:
        raise RequestError(f"{where}.content: {error}") from None


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PICTURES


def _data_url(part: Mapping[str, Any], where: str) -> str:
    """The picture in its part. Neither files nor addresses are read: what an agent names may be what the policy said."""
    source = part.get("source") if part["type"] == "image" else part.get("image_url")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        source = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif isinstance(source, Mapping):
        source = source.get("url")
    if not isinstance(source, str) or not source.startswith("data:"):
        raise RequestError(f"{where}.content has a picture that is no data: URL; addresses, files and ids are not read here")
    return source


def checked_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """`tools` of a request.

    Raises:
        RequestError: they are no list of functions with names.
    """
    schemas = [] if tools is None else tools
    is_list = isinstance(schemas, list) and all(isinstance(tool, dict) and tool.get("type") == "function" for tool in schemas)
    if not is_list or not all(isinstance(tool.get("function"), dict) and tool["function"].get("name") for tool in schemas):
        raise RequestError("tools must be a list of {'type': 'function', 'function': {'name': ..., 'parameters': ...}}")
    return tuple(schemas)


def stop_strings(value: Any, name: str) -> tuple[str, ...]:
    """`stop` of a request: nothing, a string, or a list of them; empty ones are left out.

    Raises:
        RequestError: it is something else.
    """
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"{name} must be a string, or a list of at most {MOST_STOPS} strings")
    return tuple(filter(None, stops))


def template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` of a request, as SGLang and vLLM have it beside what the protocols define.

    Raises:
        RequestError: it is no object.
    """
    args = body.get("chat_template_kwargs")
    if args is not None and not isinstance(args, dict):
        raise RequestError("chat_template_kwargs must be an object of options of the chat template")
    return args or {}


def positive(value: Any, name: str) -> int | None:
    """A whole number from 1, or None.

    Raises:
        RequestError: it is something else.
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value
