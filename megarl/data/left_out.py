"""Parts of chat messages that a chat template does not write: found by rendering with and without them.

A template drops what it does not know without a word. The first rows are looked at whole, later ones only where a message has
a set of keys that was not seen before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megarl.data.chat_rendering import EndlessTemplateError, TemplateError, render
from megarl.data.message_forms import REASONING
from megarl.errors import DataError

FIRST_ROWS = 200
"""Conversations that are looked at whole."""
LOST = ("content", "tool_calls", "function_call")
"""Keys whose loss is an error in any message."""
NOT_WRITTEN = ("role", "weight")
"""Keys that megarl reads itself."""
_PROBE = "\ue000probe\ue001"
_Message = Mapping[str, Any]


class LeftOut:
    """Looks at the conversations of one data source, or of one agent's run."""

    def __init__(self, tokenizer: Any, ignored: Collection[str] = (), *, refuses: bool = True) -> None:
        """`ignored`: keys whose loss is accepted (`data.ignore_fields`). Without `refuses` every loss is a warning."""
        self.tokenizer, self.ignored, self.refuses = tokenizer, frozenset(ignored), refuses
        self._rows = 0
        self._seen: set[Any] = set()
        self._warned: set[str] = set()
        self._takes: dict[tuple[str, bool], bool] = {}
        self._is_endless = False

    def in_parts_or_text(self, messages: Sequence[_Message], place: Any, own: int = 0) -> list[dict[str, Any]]:
        """`messages` with contents as the template takes them: parts of text joined, or text as a part.

        Raises:
            DataError: a content has a part that is no text, and the template takes text alone.
        """
        changed = []
        for at, message in enumerate(messages):
            content, role = message.get("content"), str(message.get("role"))
            if isinstance(content, list) and not self._takes_content(role, parts=True):
                message = {**message, "content": self._joined(content, place, at - own)}
            elif isinstance(content, str) and content and self._takes_parts_alone(role):
                message = {**message, "content": [{"type": "text", "text": content}]}
            changed.append(dict(message))
        return changed

    def check(
        self,
        messages: Sequence[_Message],
        place: Any,
        *,
        trained: Collection[int] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        args: Mapping[str, Any] | None = None,
        own: int = 0,
        tools_of_row: bool = False,
    ) -> None:
        """Look for what the template leaves out of `messages`, and warn of what is harmless, once per key.

        Args:
            messages: the conversation, with contents as `in_parts_or_text` gives them.
            place: names the row in messages.
            trained: numbers of the messages that are trained on.
            tools: JSON schemas of what may be called.
            args: options of the template.
            own: messages at the beginning that are no part of the row.
            tools_of_row: their loss is an error; that of the run's tools is a warning.

        Raises:
            DataError: content is lost; names row, message and key.
        """
        due = self._due(messages, trained)
        if tools and (self._rows <= FIRST_ROWS or "tools" not in self._seen):
            self._seen.add("tools")
            if self._writes(messages, None, args) == self._writes(messages, tools, args):
                self._tell("tools", lambda: f"{place}", is_error=tools_of_row)
        if not due:
            return
        whole = self._writes([_marked(message, at) for at, message in enumerate(messages)], tools, args) or ""
        for at in due:
            message, is_trained = messages[at], at in trained
            for key in _keys_of(message):
                if key == "content" and all(mark in whole for mark in _marks(message, at)):
                    continue
                if self._is_left_out(messages[: at + 1], key, tools, args):
                    is_error = key in LOST or (key in REASONING and is_trained)
                    turn = f"the {message['role']}'s{' and trained on' if is_trained else ''}"
                    self._tell(key, partial(_where, place, at - own, turn), is_error=is_error)

    def _due(self, messages: Sequence[_Message], trained: Collection[int]) -> list[int]:
        """Numbers of the messages to look at."""
        self._rows += 1
        due = []
        for at, message in enumerate(messages):
            kind = (message.get("role"), at in trained, type(message.get("content")), frozenset(_keys_of(message)))
            if self._rows <= FIRST_ROWS or kind not in self._seen:
                self._seen.add(kind)
                due.append(at)
        return due

    def _is_left_out(
        self, messages: Sequence[_Message], key: str, tools: Sequence[Mapping[str, Any]] | None, args: Mapping[str, Any] | None
    ) -> bool:
        """Return whether the template writes the last of `messages` alike with and without `key`."""
        *before, message = messages
        if key == "content":
            text = self._writes([*before, _marked(message, 0)], tools, args)
            return text is not None and not all(mark in text for mark in _marks(message, 0))
        full = self._writes(messages, tools, args)
        without = self._writes([*before, {name: value for name, value in message.items() if name != key}], tools, args)
        return full is not None and full == without

    def _tell(self, key: str, where: Callable[[], str], *, is_error: bool) -> None:
        if key in self.ignored:
            return
        if is_error and self.refuses:
            raise DataError(
                f"the chat template leaves out '{key}' of {where()}; use a template that writes it, or accept the loss by "
                f"data.ignore_fields: [{key}]"
            )
        if key not in self._warned:
            self._warned.add(key)
            logging.getLogger(__name__).warning(
                "warning: the chat template leaves out '%s' of %s, and perhaps of others; data.ignore_fields: [%s] accepts it",
                key, where(), key,
            )  # fmt: skip

    def _joined(self, content: Sequence[Any], place: Any, number: int) -> str:
        texts = [part if isinstance(part, str) else part.get("text") if _is_text(part) else None for part in content]
        other = next((part for part, text in zip(content, texts, strict=True) if not isinstance(text, str)), None)
        if other is not None and "content" not in self.ignored:
            kind = other.get("type") if isinstance(other, Mapping) else type(other).__name__
            raise DataError(
                f"message {number} (counted from 0) of {place} has a part of type '{kind}' in its content, but the chat "
                "template takes text alone; leave it out, or accept the loss by data.ignore_fields: [content]"
            )
        return "".join(text for text in texts if isinstance(text, str))

    def _takes_parts_alone(self, role: str) -> bool:
        return not self._takes_content(role, parts=False) and self._takes_content(role, parts=True)

    def _takes_content(self, role: str, *, parts: bool) -> bool:
        """Return whether the template writes a message of `role` whose content is a list of `parts`, or a text."""
        if (role, parts) not in self._takes:
            content: Any = [{"type": "text", "text": _PROBE}] if parts else _PROBE
            said: dict[str, Any] = {"role": role, "content": content}
            user: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "?"}] if parts else "?"}
            conversation = [said] if role == "user" else [said, user] if role == "system" else [user, said]
            text = self._writes(conversation, None, None) or ""
            self._takes[role, parts] = _PROBE in text and "'type'" not in text and '"type"' not in text
        return self._takes[role, parts]

    def _writes(
        self,
        messages: Sequence[_Message],
        tools: Sequence[Mapping[str, Any]] | None,
        args: Mapping[str, Any] | None,
    ) -> str | None:
        """The conversation as the template writes it; None: it refuses it, which is told where it is rendered to be used."""
        if self._is_endless:
            return None
        try:
            return render(self.tokenizer, [*map(dict, messages)], [*map(dict, tools)] if tools else None, ask=False, args=args)
        except TemplateError as error:
            self._is_endless = isinstance(error, EndlessTemplateError)
            return None


def _keys_of(message: _Message) -> Iterator[str]:
    """The keys of a message with something under them that are the template's."""
    return (str(key) for key, value in message.items() if key not in NOT_WRITTEN and value not in (None, "", [], {}))


def _where(place: Any, number: int, turn: str) -> str:
    return f"message {number} (counted from 0) of {place}, {turn}" if number >= 0 else f"data.system_prompt, before {place}"


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text"


def _marked(message: _Message, number: int) -> dict[str, Any]:
    """Message `number` with a mark of its own behind each text of its content."""
    content = message.get("content")
    if isinstance(content, str) and content:
        return {**message, "content": content + _mark(number, 0)}
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {**part, "text": f"{part.get('text', '')}{_mark(number, at)}"} if _is_text(part) else part
        for at, part in enumerate(content)
    ]
    return {**message, "content": parts}


def _marks(message: _Message, number: int) -> list[str]:
    content = message.get("content")
    if isinstance(content, list):
        return [_mark(number, at) for at, part in enumerate(content) if _is_text(part)]
    return [_mark(number, 0)] if isinstance(content, str) and content else []


def _mark(number: int, part: int) -> str:
    return f"\ue000{number}.{part}\ue001"
