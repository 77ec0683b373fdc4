"""Chat messages as the text that is tokenised: the tokenizer's template, the system message, and what is trained in it.

Text only: which part of a rendered conversation the model is trained on is decided here, tokens are made elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megarl.data.chat_rendering import TemplateError, render
from megarl.data.message_forms import in_todays_form, system_of, with_own_system
from megarl.data.rows import Row, RowPlace
from megarl.errors import DataError

ChatMessage = dict[str, Any]
RowTools = list[dict[str, Any]]
"""JSON schemas of what may be called."""
TrainedText = tuple[str, bool]
"""A piece of text, and whether the model is trained on it."""


def special_tokens(tokenizer: Any) -> set[str]:
    """The texts of the tokens that mark turns, beginnings and ends."""
    added = tokenizer.added_tokens_decoder.values()
    return {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)


class ChatTemplate:
    """Whether and how the tokenizer's chat template is applied. `is_used` says whether."""

    def __init__(self, tokenizer: Any, choice: str, system_prompt: str | None, tools: Sequence[dict[str, Any]] = ()) -> None:
        """Decide once: `choice` is `data.chat_template`, `system_prompt` comes before every conversation.

        `tools`: JSON schemas of what the policy may call, which the template describes to it as it likes.

        Raises:
            DataError: `choice` is `always`, and the tokenizer has no template.
        """
        has_template = bool(tokenizer.chat_template)
        if choice == "always" and not has_template:
            raise DataError(
                "data.chat_template is 'always', but the model's tokenizer has no chat template; it must be 'auto' or 'never'"
            )
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.tools = list(tools) or None
        self.is_used = has_template and choice != "never"
        self._why_not = "data.chat_template is 'never'" if choice == "never" else "the tokenizer has no chat template"
        self._special = special_tokens(tokenizer)

    def messages(self, value: Any, key: str, place: RowPlace) -> list[ChatMessage]:
        """The value under `key` as messages: text is one user message.

        Raises:
            DataError: it is neither text nor a list of messages, or there is no template for messages.
        """
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        value = in_todays_form(value, str(self.tokenizer.chat_template or ""))
        messages = [_with_calls(message) for message in value] if isinstance(value, list) else []
        wrong = [at for at, item in enumerate(messages) if not (isinstance(item, dict) and {"role", "content"} <= item.keys())]
        if not messages or wrong:
            which = f", whose message {wrong[0]} (counted from 0) is {messages[wrong[0]]!r:.80}" if wrong else ""
            raise DataError(
                f"{place} has a {type(value).__name__} under '{key}'{which}; it must be text or a list of chat messages, each "
                "with 'role' and 'content', or 'tool_calls' in its place"
            )
        if not self.is_used:
            raise DataError(f"{place} has chat messages under '{key}', but {self._why_not}; it must be text")
        return messages

    def with_system(self, messages: list[ChatMessage], place: RowPlace, row: Row, key: str | None) -> list[ChatMessage]:
        """`messages` after the system message, if there is one: the run's, or that of `row` under `key` (`data.system_key`).

        Raises:
            DataError: the row brings a system message of its own as well.
        """
        messages = with_own_system(messages, system_of(row, key, place), key, place)
        if self.system_prompt is None:
            return messages
        if messages and messages[0]["role"] == "system":
            raise DataError(f"{place} has a system message of its own, but data.system_prompt is set; it must be null")
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def plain_prompt(self, prompt: str, place: RowPlace, row: Row, key: str | None) -> str:
        """A prompt of plain text, after the system message and an empty line if there is one.

        Raises:
            DataError: the row brings a system message of its own as well.
        """
        said = self.with_system([{"role": "user", "content": prompt}], place, row, key)
        return "\n\n".join(str(message["content"]) for message in said)

    def render(self, messages: Sequence[ChatMessage], place: RowPlace, *, ask: bool, tools: RowTools | None = None) -> str:
        """`messages` under the template; with `ask` up to where the assistant's next turn begins.

        `tools` are those of the row; None: those of the run.

        Raises:
            DataError: the template refuses them.
        """
        try:
            return render(self.tokenizer, messages, tools or self.tools, ask=ask)
        except TemplateError as error:
            raise DataError(f"{place} does not fit the tokenizer's chat template: {error}") from None

    def spans(
        self, messages: Sequence[ChatMessage], place: RowPlace, *, after: int = 0, tools: RowTools | None = None
    ) -> list[TrainedText]:
        """The conversation in pieces, up to the end of its last assistant turn.

        Trained are the assistant turns among `messages[after:]`, each from where the template asks for it up to and
        with its end token; a line break that the template writes behind the end token is not.

        Raises:
            DataError: there is no such turn, the first message is one, or the template renders the beginning of a
                conversation otherwise when more follows, so that no piece of it is a turn.
        """
        if messages and messages[0]["role"] == "assistant":
            raise DataError(f"{place} begins with an assistant turn, but there must be a message that it answers")
        turns = [at for at in range(after, len(messages)) if messages[at]["role"] == "assistant"]
        if not turns:
            raise DataError(f"{place} has no assistant turn to train on")
        spans: list[TrainedText] = []
        done = ""
        for turn in turns:
            before = self.render(messages[:turn], place, ask=True, tools=tools)
            through = self.render(messages[: turn + 1], place, ask=False, tools=tools)
            if not before.startswith(done) or not through.startswith(before):
                raise DataError(
                    f"{place}: the chat template renders the messages before message {turn} (counted from 0) otherwise once "
                    "that one follows, so the tokens of each turn are unknown; it needs a template that only appends"
                )
            end = self._end_of_turn(through, len(before))
            spans += [(before[len(done) :], False), (through[len(before) : end], True)]
            done = through[:end]
        return spans

    def _end_of_turn(self, text: str, start: int) -> int:
        """Behind the end token of the turn `text[start:]`; behind all of it if the template writes none."""
        ends = [text.rfind(token, start) + len(token) for token in self._special if token and token in text[start:]]
        end = max(ends, default=len(text))
        return len(text) if text[end:].strip() else end


def _with_calls(message: Any) -> Any:
    """A message with `tool_calls` (OpenAI, TRL) as templates take it: with a content, and arguments that are no JSON text.

    Keys that are null, as Parquet fills them in, are left out.
    """
    if not isinstance(message, dict) or not isinstance(message.get("tool_calls"), list) or not message["tool_calls"]:
        return message
    calls = [without_nulls(call) for call in message["tool_calls"]]
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def without_nulls(value: Any) -> Any:
    """A copy of `value` without the keys of mappings, at any depth, whose value is null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
