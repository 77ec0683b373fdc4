"""The token that ends an assistant's turn, told from the chat template, the tokenizer and the folder's generation_config.json.

Most templates write one behind every turn. GLM's close a turn with the marker of the next role, and write nothing behind the
last one: the marker is then the end. Where neither holds, only a turn that nothing follows has an end, the tokenizer's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.data.chat import ChatMessage, ChatTemplate, special_tokens
from megarl.data.chat_rendering import TemplateError, render

QUESTION = {"role": "user", "content": "megarl-question"}
ANSWER = {"role": "assistant", "content": "megarl-answer"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "megarl_call", "arguments": {"a": "b"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def stop_tokens(tokenizer: Any) -> list[str]:
    """The tokens at which an engine ends a response: those of generation_config.json, then the tokenizer's own."""
    ids: Any = []
    try:
        config = json.loads((Path(str(tokenizer.name_or_path)) / "generation_config.json").read_text(encoding="utf-8"))
        ids = config.get("eos_token_id") if isinstance(config, dict) else None
    except (OSError, ValueError):
        pass
    ids = [ids] if isinstance(ids, int) else ids if isinstance(ids, list) else []
    ids = [*(number for number in ids if isinstance(number, int)), tokenizer.eos_token_id]
    known = [number for number in dict.fromkeys(ids) if number is not None and 0 <= number < len(tokenizer)]
    return [str(token) for token in tokenizer.convert_ids_to_tokens(known)]


class TurnEnds:
    """The ends of assistant turns under one chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        """Tell them by rendering a short conversation."""
        self._template = template
        tokenizer = template.tokenizer
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | special_tokens(tokenizer)
        self.tokens = tuple(sorted(added - {""}, key=len, reverse=True))
        """Every added token, the longest first."""
        self._special = special_tokens(tokenizer)
        self.stops = stop_tokens(tokenizer)
        self._end_token: str | None = tokenizer.eos_token or next(iter(self.stops), None)
        self._of_roles: dict[str, str | None] = {}

    @cached_property
    def _behind(self) -> str:
        """The text that the template writes behind a turn that nothing follows."""
        text = self._render([QUESTION, ANSWER])
        _, found, behind = (text or "").rpartition(ANSWER["content"])
        return behind if found else ""

    @cached_property
    def written(self) -> str | None:
        """The token that the template writes behind a turn that nothing follows; None: it writes none."""
        return self._first_token(self._behind)

    @property
    def written_text(self) -> str:
        """The words that it writes there, if no token; empty: it writes none."""
        return self._behind.rstrip() if self.written is None else ""

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(self.stops) | ({self.written} if self.written is not None else set())

    def split(self, turn: str) -> tuple[str, str | None]:
        """A rendered turn as what is in it and its end, a token or a text; None: the template has written none, or not yet."""
        found: list[tuple[int, str]] = []
        end = len(turn)
        while True:
            end -= len(turn[:end]) - len(turn[:end].rstrip())
            token = next((token for token in self.tokens if turn.endswith(token, 0, end)), None)
            if token is None:
                break
            end -= len(token)
            found.append((end, token))
        known = [(at, token) for at, token in found if token in self._ends]
        if not known and self.written is not None:
            known = [(at, token) for at, token in found[:1] if token in self._special]
        if not known and self.written_text and turn.rstrip().endswith(self.written_text):
            known = [(len(turn.rstrip()) - len(self.written_text), self.written_text)]
        return (turn[: known[-1][0]], known[-1][1]) if known else (turn, None)

    def ended(self, body: str, message: ChatMessage, following: ChatMessage | None) -> tuple[str, str] | None:
        """A turn and its end, where the template itself writes none.

        Args:
            body: the turn as it is rendered.
            message: the turn.
            following: the message behind it; None: nothing follows.

        Returns:
            The turn with the marker of the role that follows, where generation stops at it, and line breaks before it. A turn
            that nothing follows has that of a tool, if it calls some, or of the user, else the tokenizer's end token. None:
            the end cannot be told.
        """
        if following is not None:
            marker = self._marker_of(str(following["role"]))
            return (body, marker) if marker is not None else None
        if self.written is not None:
            return body, self.written
        marker = (self._marker_of("tool") if message.get("tool_calls") else None) or self._marker_of("user")
        if marker is not None:
            return body, marker
        if self._end_token is None:
            return None
        content = message.get("content")
        is_as_given = isinstance(content, str) and body.endswith(content)
        return body if is_as_given else body.rstrip(), self._end_token

    def stop_at(self, text: str) -> str | None:
        """The stop token with which `text` begins, with the line breaks before it; None: it begins with none."""
        bare = text.lstrip()
        token = next((token for token in self.tokens if bare.startswith(token)), None)
        return text[: len(text) - len(bare)] + token if token in self.stops else None

    def describe(self) -> str:
        """A line for people."""
        stops = f"it stops at {', '.join(self.stops)}" if self.stops else "it stops at none"
        if self.written_text:
            return (
                f"a turn ends with the text {self.written_text!r}, which is no token: generation does not stop there ({stops})"
            )
        if self.written is not None:
            if self.written in self.stops:
                return f"a turn ends with {self.written}"
            return (
                f"a turn ends with {self.written}, at which generation does not stop ({stops}): name it under eos_token_id in "
                "the model's generation_config.json"
            )
        markers = [(marker.strip(), role) for role in ("user", "tool") if (marker := self._marker_of(role)) is not None]
        if markers:
            return "a turn ends with the marker of the next role: " + ", ".join(f"{token} ({role})" for token, role in markers)
        if self._end_token is not None:
            return f"a turn that nothing follows ends with {self._end_token}; the template writes no end"
        return "the end of a turn cannot be told"

    def _marker_of(self, role: str) -> str | None:
        """The beginning of a message of `role` behind an assistant's turn, if generation stops at it."""
        if role not in self._of_roles:
            turn: Mapping[str, Any] = CALLING if role == "tool" else ANSWER
            called = {"tool_call_id": CALL["id"], "name": "megarl_call"} if role == "tool" else {}
            short = self._render([QUESTION, turn])
            long = self._render([QUESTION, turn, {"role": role, "content": "megarl-follows", **called}])
            follows = long is not None and short is not None and long.startswith(short)
            self._of_roles[role] = self.stop_at(long[len(short) :]) if follows and long and short else None
        return self._of_roles[role]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        template = self._template
        try:
            fitted = template.left_out.in_parts_or_text(messages, "a conversation")
            return render(template.tokenizer, fitted, template.tools, ask=False, args=template.args)
        except TemplateError:
            return None

    def _first_token(self, text: str) -> str | None:
        places = [(text.find(token), -len(token), token) for token in self.tokens if token in text]
        return min(places)[2] if places else None
