"""Chat messages as the text that is tokenised: the tokenizer's template and the system message. Tokens are made elsewhere."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megarl.data.chat_rendering import TemplateError, render
from megarl.data.left_out import LeftOut
from megarl.data.rows import Row, RowPlace
from megarl.errors import DataError

ChatMessage = dict[str, Any]
RowTools = list[dict[str, Any]]
"""JSON schemas of what may be called."""
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Roles by the words of messages with `from` and `value`."""


def special_tokens(tokenizer: Any) -> set[str]:
    """The texts of the tokens that mark turns, beginnings and ends."""
    added = tokenizer.added_tokens_decoder.values()
    return {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)


def choose_template(tokenizer: Any, choice: str) -> None:
    """Give `tokenizer` the template that `data.chat_template` names, where that is a Jinja file.

    Raises:
        DataError: the file is no template.
    """
    if choice.endswith(".jinja"):
        from megarl.data.template_args import read_template

        tokenizer.chat_template = read_template(choice)


class ChatTemplate:
    """Whether and how the tokenizer's chat template is applied. `is_used` says whether."""

    def __init__(
        self,
        tokenizer: Any,
        choice: str,
        system_prompt: str | None,
        tools: Sequence[dict[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
        ignore_fields: Collection[str] = (),
    ) -> None:
        """Decide once: `choice` is `data.chat_template`, `system_prompt` comes before every conversation.

        `tools`: JSON schemas of what the policy may call, which the template describes to it as it likes. `template_args`:
        its options, which a row's own go before. `ignore_fields`: keys of messages that it may leave out. A `choice` that is a
        Jinja file becomes the template of `tokenizer`.

        Raises:
            DataError: `choice` is `always`, and the tokenizer has no template; or the file or an option is of no use.
        """
        choose_template(tokenizer, choice)
        has_template = bool(tokenizer.chat_template)
        if choice == "always" and not has_template:
            raise DataError(
                "data.chat_template is 'always', but the model's tokenizer has no chat template; it must be 'auto' or 'never'"
            )
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.tools = list(tools) or None
        self.is_used = has_template and choice != "never"
        self._why_not = "data.chat_template is 'never'" if choice == "never" else "the tokenizer has no chat template"
        self.args = dict(template_args or {})
        self.left_out = LeftOut(tokenizer, ignore_fields)
        self._check_args(self.args, "data.template_args")

    def messages(self, value: Any, key: str, place: RowPlace) -> list[ChatMessage]:
        """The value under `key` as messages: text is one user message.

        Raises:
            DataError: it is neither text nor a list of messages, or there is no template for messages.
        """
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        messages = [_with_calls(_with_role(message)) for message in value] if isinstance(value, list) else []
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

    def with_system(self, messages: list[ChatMessage], place: RowPlace) -> list[ChatMessage]:
        """`messages` after the system message, if there is one.

        Raises:
            DataError: the row brings a system message of its own as well.
        """
        if self.system_prompt is None:
            return messages
        if messages and messages[0]["role"] == "system":
            raise DataError(f"{place} has a system message of its own, but data.system_prompt is set; it must be null")
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def plain_prompt(self, prompt: str) -> str:
        """A prompt of plain text, after the system prompt and an empty line if there is one."""
        return prompt if self.system_prompt is None else f"{self.system_prompt}\n\n{prompt}"

    def args_of(self, row: Row, place: RowPlace) -> dict[str, Any] | None:
        """The options under the row's own `template_args`, a mapping or its JSON text; None where it has none.

        Raises:
            DataError: they are of no use to the template.
        """
        if row.get("template_args") is None:
            return None
        from megarl.data.template_args import args_of_row

        args = args_of_row(row["template_args"], place)
        self._check_args(args, f"{place}: template_args")
        return args

    def _check_args(self, args: Mapping[str, Any], where: str) -> None:
        if not args:
            return
        from megarl.data.template_args import check_args

        if not self.is_used:
            raise DataError(f"{where} has '{next(iter(args))}', but {self._why_not}, so that nothing reads it; remove it")
        check_args(self.tokenizer, args, where)

    def fitted(
        self,
        messages: Sequence[ChatMessage],
        place: RowPlace | str,
        *,
        after: int | None = None,
        tools: RowTools | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> list[ChatMessage]:
        """`messages` with contents as the template takes them, of which it leaves out nothing that matters.

        Assistant turns among `messages[after:]` are trained on; None: none is. `tools` and `args` as of `render`.

        Raises:
            DataError: content would be lost; names row, message and key.
        """
        own = int(self.system_prompt is not None)
        fitted = self.left_out.in_parts_or_text(messages, place, own)
        trained = [] if after is None else [at for at in range(after, len(fitted)) if fitted[at]["role"] == "assistant"]
        self.left_out.check(
            fitted, place, trained=trained, tools=tools or self.tools, args={**self.args, **(args or {})}, own=own,
            tools_of_row=bool(tools),
        )  # fmt: skip
        return fitted

    def render(
        self,
        messages: Sequence[ChatMessage],
        place: RowPlace | str,
        *,
        ask: bool,
        tools: RowTools | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> str:
        """`messages` under the template; with `ask` up to where the assistant's next turn begins.

        `tools` are those of the row; None: those of the run. `args` are the row's own options, which go before the run's.

        Raises:
            DataError: the template refuses them.
        """
        try:
            return render(self.tokenizer, messages, tools or self.tools, ask=ask, args={**self.args, **(args or {})})
        except TemplateError as error:
            raise DataError(f"{place} does not fit the tokenizer's chat template: {error}") from None


def _with_role(message: Any) -> Any:
    """A message with `from` and `value` (ShareGPT) as one with `role` and `content`; any other as it is."""
    if not isinstance(message, dict) or not {"from", "value"} <= message.keys() or str(message["from"]) not in SHAREGPT_ROLES:
        return message
    return {"role": SHAREGPT_ROLES[message["from"]], "content": message["value"]}


def _with_calls(message: Any) -> Any:
    """A message with `tool_calls` (OpenAI, TRL) as templates take it: with a content, and arguments that are no JSON text.

    Keys that are null, as Parquet fills them in, are left out.
    """
    if not isinstance(message, dict):
        return message
    if any(value is None for key, value in message.items() if key != "content"):
        message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not isinstance(message.get("tool_calls"), list) or not message["tool_calls"]:
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
