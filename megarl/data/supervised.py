"""From data rows to samples to be trained on as they stand: responses, conversations, pairs, labelled responses, steps.

Prompt ids are everything before the first trained token, `sampled_mask` is 1 on the tokens to be trained on, and a
response ends with its last trained token. Nothing is truncated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from megarl.config.section import TemplateChoice
from megarl.config.sections import PictureFields
from megarl.config.supervised import LABELLED_LOSSES, PAIR_LOSSES, TOKEN_LOSSES, SupervisedFields
from megarl.data.chat import ChatMessage, ChatTemplate, RowTools, without_nulls
from megarl.data.columns import of_responses
from megarl.data.message_forms import OLD_TOOLS, as_schemas
from megarl.data.row_media import MediaReader
from megarl.data.row_template import with_prompt
from megarl.data.row_texts import RowsRead, RowText, RowTokens, TextsOfRow, in_chunks, media_in, share_prompt
from megarl.data.rows import Origin, Row, RowPlace, check_text, find_value, value_of
from megarl.data.sample import Sample
from megarl.data.span_ids import SpanTokeniser
from megarl.data.turn_shapes import TurnShapes
from megarl.data.turn_spans import Conversation, TrainedText, TurnSpans
from megarl.errors import DataError, PictureError, counted, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.data.batch import Batch
    from megarl.data.stream import MicroBatch

Kind = Literal["sft", "pairs", "kto", "steps"]
"""Responses or conversations; chosen and rejected; responses that are desirable or not; responses judged step by step."""
CONVERSATIONS = ("messages", "conversations")
"""Keys under which data sets have conversations."""
AT_ONCE = 128
"""Rows that are tokenised together."""


def kind_of_rows(objective: str) -> Kind:
    """The kind of the rows of `objective.name`."""
    if objective in TOKEN_LOSSES:
        return "sft"
    return "kto" if objective in LABELLED_LOSSES else "pairs" if objective in PAIR_LOSSES else "steps"


@dataclass(frozen=True)
class SupervisedSettings:
    """Keys of a row and what is done with it; the fields are those of the config's `data` section, described there."""

    prompt: str | None = None
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str | None = None
    tools_key: str | None = "tools"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    label_key: str = "label"
    steps_key: str = "steps"
    margin_key: str | None = None
    equal_pairs: Literal["error", "drop"] = "error"
    system_prompt: str | None = None
    system_key: str | None = "system"
    turns: Literal["together", "each", "last"] = "together"
    chat_template: TemplateChoice = "auto"
    template_args: Mapping[str, Any] = field(default_factory=dict)
    ignore_fields: Collection[str] = ()
    max_tokens: int = 1024
    overlong: Literal["error", "drop"] = "error"
    bad_pictures: Literal["error", "drop"] = "error"

    @classmethod
    def of(cls, data: SupervisedFields) -> Self:
        """The settings of a config's `data` section."""
        return cls(**{setting.name: getattr(data, setting.name) for setting in fields(cls)})


class SupervisedBuilder:
    """Makes samples of one kind from rows.

    `dropped` counts rows left out, as `overlong`, `equal_pairs`, `bad_pictures`, or `not_kept` by their source.
    """

    def __init__(
        self,
        tokenizer: Any,
        kind: Kind,
        settings: SupervisedSettings,
        media: MediaReader | None = None,
        *,
        field: str = "data.turns",
    ) -> None:
        """Decide once whether the chat template is used. `media` reads those of rows; None: rows must have none.

        `field` is where the config has `settings.turns`, for errors.

        Raises:
            DataError: `kind` is unknown, or `settings.chat_template` is `always` and the tokenizer has none.
        """
        if kind not in get_args(Kind):
            kinds = get_args(Kind)
            raise DataError(f"the kind of rows is '{kind}'{nearest(kind, kinds)}; it must be one of {', '.join(kinds)}")
        self.tokenizer, self.kind, self.settings = tokenizer, kind, settings
        self.template = ChatTemplate(
            tokenizer,
            settings.chat_template,
            settings.system_prompt,
            template_args=settings.template_args,
            ignore_fields=settings.ignore_fields,
        )
        each = f"set {field} to 'each', which makes a sample of every assistant turn, or to 'last'"
        self.turns = TurnSpans(self.template, each if kind == "sft" else "it needs a template that only appends")
        self._tokeniser = SpanTokeniser(tokenizer, special=not self.template.is_used)
        self.media = media or MediaReader(PictureFields())
        self.dropped = {"overlong": 0, "equal_pairs": 0, "bad_pictures": 0, "not_kept": 0}

    def build(self, rows: Iterable[Row | None], *, prefix: str, origin: Origin | None = None) -> list[Sample]:
        """The samples of all rows in their order: one per row with the row's id, or two, `<row id>/chosen` and `/rejected`, or
        with `turns: each` one per turn, `<row id>/turn-<number from 1>`.

        `row_id` is `<prefix>-<row number>`, and so is `group_id` until a sampler hands the row out. `labels` are set for
        `kto` (the same on every trained token) and `steps` (one per step, on the step's last token).

        Args:
            rows: data rows; None in place of one that its source leaves out.
            prefix: what row ids begin with, such as `train` or `eval`.
            origin: where the rows are from; None: the section `data.<prefix>`.

        Raises:
            DataError: a row is not of the kind, is too long, has two equal sides or a picture that cannot be used where
                that is an error, or no row is left.
        """
        origin = origin or Origin(f"data.{prefix}")
        samples: list[Sample] = []
        read = RowsRead()
        for texts in in_chunks(self._texts(rows, prefix, origin, read), AT_ONCE):
            spans = [[piece for piece, _ in side.spans] for text in texts for side in text.sides.values()]
            ids = iter(self._tokeniser.ids(spans))
            for text in texts:
                of_sides = {side: next(ids) for side in text.sides}
                try:
                    samples += self._of_text(text, of_sides)
                except PictureError as error:
                    self._drop_picture(error)
        if not samples:
            left = " and ".join(f"{count} dropped as {why}" for why, count in self.dropped.items() if count)
            why = f"of {counted(read.rows, 'row')} {left}" if read.rows else "it has no rows"
            raise DataError(f"{origin} gives no samples: {why}")
        return samples

    def _texts(self, rows: Iterable[Row | None], prefix: str, origin: Origin, read: RowsRead) -> Iterator[TextsOfRow]:
        """Every row as text, but for those that are left out, which are counted."""
        settings = self.settings
        keys = [settings.prompt_key, settings.messages_key, settings.chosen_key, settings.rejected_key]
        for place, row in self.media.light_rows(rows, origin, [key for key in keys if key is not None]):
            read.rows = place.number + 1
            if row is None:
                self.dropped["not_kept"] += 1
                continue
            try:
                if isinstance(row, PictureError):
                    raise row
                row = with_prompt(row, settings.prompt, settings.prompt_key, place)
                text = self._of_row(row, f"{prefix}-{place.number}", place)
            except PictureError as error:
                self._drop_picture(error)
                continue
            yield text

    def _drop_picture(self, error: PictureError) -> None:
        if self.settings.bad_pictures == "error":
            raise error
        self.dropped["bad_pictures"] += 1

    def _of_row(self, row: Row, row_id: str, place: RowPlace) -> TextsOfRow:
        labels: list[float] = []
        if self.kind == "pairs":
            sides = dict(zip(("/chosen", "/rejected"), self._pair(row, place), strict=True))
            self._check_margin(row, place)
        elif self.kind == "steps":
            text, labels = self._steps(row, place)
            sides = {"": text}
        else:
            sides = self._response(row, place)
        if self.kind == "kto":
            labels = [self._desirable(row, place)]
        for text in sides.values():
            check_text("".join(piece for piece, _ in text.spans), place)
        return TextsOfRow(row, row_id, place, sides, labels)

    def _of_text(self, text: TextsOfRow, ids: Mapping[str, Sequence[Sequence[int]]]) -> list[Sample]:
        """The samples of a row, whose pieces have these `ids`."""
        place, row_id, labels = text.place, text.row_id, text.labels
        sides = {side: self._tokens(one, ids[side], place) for side, one in text.sides.items()}
        if self.kind == "kto":
            labels = labels * sum(sides[""].mask)
        for tokens in sides.values():
            if not tokens.prompt_ids:
                raise DataError(f"{place} has no token before the first one to be trained on; its prompt must not be empty")
        if self._is_left_out(list(sides.values()), place):
            return []
        if self.kind == "sft" and len(sides) > 1:
            share_prompt(list(sides.values()))
        return [
            Sample(
                row_id + side, row_id, row_id, tokens.prompt_ids, tokens.response_ids, tokens.mask, [], [], "stop",
                prompt_text=tokens.prompt_text, response_text=tokens.response_text, row=text.row, labels=labels,
                media=tokens.media,
            )
            for side, tokens in sides.items()
        ]  # fmt: skip

    def _is_left_out(self, sides: Sequence[RowTokens], place: RowPlace) -> bool:
        """Return whether the row is dropped; it is counted then."""
        settings = self.settings
        longest = max(len(tokens.prompt_ids) + len(tokens.response_ids) for tokens in sides)
        if longest > settings.max_tokens:
            if settings.overlong == "error":
                raise DataError(
                    f"{place} has {longest} tokens, but data.max_tokens is {settings.max_tokens}; raise it, or set "
                    "data.overlong to 'drop'"
                )
            self.dropped["overlong"] += 1
            return True
        if self.kind == "pairs" and sides[0] == sides[1]:
            if settings.equal_pairs == "error":
                raise DataError(
                    f"{place} has the same tokens under '{settings.chosen_key}' and '{settings.rejected_key}', but a pair "
                    "needs two different sides; mend the row, or set data.equal_pairs to 'drop'"
                )
            self.dropped["equal_pairs"] += 1
            return True
        return False

    def _response(self, row: Row, place: RowPlace) -> dict[str, RowText]:
        settings = self.settings
        if (key := self._conversation_key(row)) is not None:
            value = _from_json(value_of(row, key, "data.messages_key", place))
            if isinstance(value, str):
                raise DataError(f"{place} has text under '{key}', but data.messages_key names a list of chat messages")
            messages = self._with_system(self.template.messages(value, key, place), row, place)
            if self.kind == "kto" and messages[-1]["role"] != "assistant":
                raise DataError(f"{place} ends with the {messages[-1]['role']} under '{key}', but its label is of an answer")
            return self._by_turns(row, messages, place, len(messages) - 1 if self.kind == "kto" else 0)
        key = settings.response_key
        value = value_of(row, key, "data.response_key", place)
        if not isinstance(value, list):
            return {"": self._answered(row, self._text(row, key, "data.response_key", place), place)}
        turns = self.template.messages(value, key, place)
        if turns[0]["role"] != "assistant":
            raise DataError(f"{place} begins with the {turns[0]['role']} under '{key}'; a response begins with the assistant")
        prompt_messages = self._prompt_messages(row, place)
        return self._by_turns(row, [*prompt_messages, *turns], place, len(prompt_messages))

    def _by_turns(self, row: Row, messages: list[ChatMessage], place: RowPlace, after: int) -> dict[str, RowText]:
        """A conversation as the samples that `data.turns` asks for."""
        if self.kind != "sft" or self.settings.turns == "together":
            return {"": self._together(row, messages, place, after)}
        conversation, shown = self._conversation(row, messages, place, after)
        spans = (self._shapes_of_each if self.settings.turns == "each" else self._shapes_of_last).spans(conversation)
        ends = conversation.turns[-len(spans) :]
        texts = [RowText(one, shown[: media_in(conversation.messages[:at])]) for at, one in zip(ends, spans, strict=True)]
        return {"": texts[0]} if self.settings.turns == "last" else {f"/turn-{n}": text for n, text in enumerate(texts, 1)}

    def _together(self, row: Row, messages: list[ChatMessage], place: RowPlace, after: int) -> RowText:
        conversation, shown = self._conversation(row, messages, place, after)
        (spans,) = self._shapes.spans(conversation)
        # what follows the last answer is no part of the sample, nor are its media
        return RowText(spans, shown[: media_in(conversation.messages[: conversation.turns[-1]])] if shown else [])

    @cached_property
    def _shapes(self) -> TurnShapes:
        return TurnShapes(self.turns, lambda turns, conversation: [turns.together(conversation)])

    @cached_property
    def _shapes_of_each(self) -> TurnShapes:
        return TurnShapes(self.turns, TurnSpans.each)

    @cached_property
    def _shapes_of_last(self) -> TurnShapes:
        return TurnShapes(self.turns, lambda turns, conversation: turns.each(conversation, only_last=True))

    def _conversation(
        self, row: Row, messages: list[ChatMessage], place: RowPlace, after: int
    ) -> tuple[Conversation, list[Any]]:
        messages, shown = self.media.arrange(row, messages, place)
        tools, args = self._tools(row, place), self.template.args_of(row, place)
        messages = self.template.fitted(messages, place, after=after, tools=tools, args=args)
        return Conversation(messages, place, tools, args, after), shown

    def _conversation_key(self, row: Row) -> str | None:
        """`data.messages_key`; where it is null and the row has no response, the name that conversations usually have."""
        settings = self.settings
        if settings.messages_key is not None or find_value(row, settings.response_key) is not None:
            return settings.messages_key
        return next((key for key in CONVERSATIONS if isinstance(row.get(key), list)), None)

    def _tools(self, row: Row, place: RowPlace) -> RowTools | None:
        """Tools that the assistant of this row may call: JSON schemas, or their JSON text."""
        key = self.settings.tools_key
        if key is None:
            return None
        if (tools := find_value(row, key)) is None:
            tools = find_value(row, OLD_TOOLS)
        if isinstance(tools, str):
            try:
                tools = json.loads(tools) if tools.strip() else None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place} has text under '{key}' (data.tools_key) that is no JSON: {error}") from None
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise DataError(f"{place} has {tools!r:.80} under '{key}' (data.tools_key); it must be a list of JSON schemas")
        return as_schemas(without_nulls(tools)) if tools else None

    def _answered(self, row: Row, response: str, place: RowPlace) -> RowText:
        """The row's prompt, not trained on, and `response` with its end token, trained on."""
        prompt = value_of(row, self.settings.prompt_key, "data.prompt_key", place)
        if isinstance(prompt, str) and not self.template.is_used:
            self.media.check_texts([{"role": "assistant", "content": response}], place)
            text, shown = self.media.arrange_text(row, self._plain_prompt(prompt, row, place), place)
            return RowText([(text, False), (response, True)], shown)
        prompt_messages = self._prompt_messages(row, place)
        messages = [*prompt_messages, {"role": "assistant", "content": response}]
        return self._together(row, messages, place, len(prompt_messages))

    def _prompt_messages(self, row: Row, place: RowPlace) -> list[ChatMessage]:
        key = self.settings.prompt_key
        messages = self.template.messages(value_of(row, key, "data.prompt_key", place), key, place)
        return self._with_system(messages, row, place)

    def _with_system(self, messages: list[ChatMessage], row: Row, place: RowPlace) -> list[ChatMessage]:
        return self.template.with_system(messages, place, row, self.settings.system_key)

    def _plain_prompt(self, prompt: str, row: Row, place: RowPlace) -> str:
        return self.template.plain_prompt(prompt, place, row, self.settings.system_key)

    def _pair(self, row: Row, place: RowPlace) -> list[RowText]:
        """Chosen and rejected; of two message lists the assistant turns after their common beginning are trained on."""
        keys = {self.settings.chosen_key: "data.chosen_key", self.settings.rejected_key: "data.rejected_key"}
        values = {key: value_of(row, key, name, place) for key, name in keys.items()}
        if all(isinstance(value, str) for value in values.values()):
            texts = [self._text(row, key, name, place) for key, name in keys.items()]
            if self.settings.prompt_key not in row:
                return self._pair_of_texts(texts, row, place)
            return [self._answered(row, text, place) for text in texts]
        for key, value in values.items():
            if isinstance(value, str):
                raise DataError(
                    f"{place} has text under '{key}' and messages on the other side; both must be text, or both lists"
                )
        sides = {key: self._side(row, value, key, place) for key, value in values.items()}
        chosen, rejected = sides.values()
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if chosen == rejected:  # equal in their last turn too: what they answer is still that turn
            shared -= 1
        for key, side in sides.items():
            role = side[shared]["role"] if shared < len(side) else "end"
            if not shared or role != "assistant":
                raise DataError(
                    f"{place}: where its two sides part (message {shared}, counted from 0), '{key}' has the {role}, but "
                    "they must share their beginning and part in an assistant turn"
                )
        return [self._together(row, side, place, shared) for side in sides.values()]

    def _pair_of_texts(self, texts: Sequence[str], row: Row, place: RowPlace) -> list[RowText]:
        """Two texts that both begin with the prompt.

        As in TRL (`extract_prompt`): the prompt is what they have in common, without a space at its end; where one side is
        the beginning of the other, its last character is its answer.
        """
        if self.template.is_used:
            raise DataError(
                f"{place} has no key '{self.settings.prompt_key}' (data.prompt_key), and its two sides are text; set "
                "data.chat_template to 'never' to read them as plain text that begins with the prompt"
            )
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
        if start == min(map(len, texts)) or texts[0][:start].endswith(" "):
            start -= 1
        for text in texts:
            self.media.check_texts([{"role": "assistant", "content": text}], place)
        prompt = self._plain_prompt(texts[0][:start], row, place)
        return [RowText([(prompt, False), (text[start:], True)], []) for text in texts]

    def _check_margin(self, row: Row, place: RowPlace) -> None:
        key = self.settings.margin_key
        if key is None:
            return
        margin = value_of(row, key, "data.margin_key", place)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
            raise DataError(f"{place} has {margin!r:.80} under '{key}'; the margin of a pair must be a number of at least 0")

    def _side(self, row: Row, value: Any, key: str, place: RowPlace) -> list[ChatMessage]:
        """One side as a whole conversation.

        A list that begins with an assistant turn answers the row's prompt. So does one that the row's prompt, if it is a
        list, is not the beginning of; a prompt that is text is then the same as what the list begins with (as in TRL).
        """
        messages = self.template.messages(value, key, place)
        if messages[0]["role"] == "assistant":
            return [*self._prompt_messages(row, place), *messages]
        if isinstance(find_value(row, self.settings.prompt_key), list):
            prompt = self.template.messages(find_value(row, self.settings.prompt_key), self.settings.prompt_key, place)
            if messages[: len(prompt)] != prompt:
                return self._with_system([*prompt, *messages], row, place)
        return self._with_system(messages, row, place)

    def _desirable(self, row: Row, place: RowPlace) -> float:
        key = self.settings.label_key
        label = value_of(row, key, "data.label_key", place)
        if label not in (0, 1):  # True and False are these
            raise DataError(f"{place} has {label!r} under '{key}'; the label of a response must be true or false, or 1 or 0")
        return float(label)

    def _steps(self, row: Row, place: RowPlace) -> tuple[RowText, list[float]]:
        """The response of all steps, each ending with a line break or the response, and a label for every step."""
        key, label_key = self.settings.steps_key, self.settings.label_key
        steps, labels = value_of(row, key, "data.steps_key", place), value_of(row, label_key, "data.label_key", place)
        if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
            raise DataError(f"{place} has {steps!r:.80} under '{key}'; it must be a list of texts, none of them empty")
        if not isinstance(labels, list) or not all(isinstance(item, bool | int | float) and 0 <= item <= 1 for item in labels):
            raise DataError(f"{place} has {labels!r:.80} under '{label_key}'; it must be a list of numbers from 0 to 1")
        if len(labels) != len(steps):
            raise DataError(f"{place} has {len(labels)} labels under '{label_key}' for {len(steps)} steps under '{key}'")
        lines = [step.removesuffix("\n") + "\n" for step in steps[:-1]] + [steps[-1].removesuffix("\n")]
        content = "".join(lines)
        answered = self._answered(row, content, place)
        *prompt_spans, (turn, _) = answered.spans
        start = turn.find(content)
        if start < 0:
            raise DataError(f"{place}: the chat template changes the text of the response, so its steps are not found in it")
        ends = [start + sum(map(len, lines[: count + 1])) for count in range(len(lines) - 1)]
        pieces: list[TrainedText] = [(turn[a:b], True) for a, b in zip([0, *ends], [*ends, len(turn)], strict=True)]
        return RowText([*prompt_spans, *pieces], answered.shown, only_ends=True), [float(label) for label in labels]

    def _text(self, row: Row, key: str, name: str, place: RowPlace) -> str:
        value = value_of(row, key, name, place)
        if not isinstance(value, str) or not value:
            raise DataError(f"{place} has {value!r:.80} under '{key}' ({name}); it must be text that is not empty")
        return value

    def _tokens(self, text: RowText, pieces: Sequence[Sequence[int]], place: RowPlace) -> RowTokens:
        """Tokens of a sample, whose spans have the ids `pieces`.

        Plain text ends with the tokenizer's end token, if it has one.
        """
        spans, end = text.spans, self.tokenizer.eos_token_id
        first = next(at for at, (_, is_trained) in enumerate(spans) if is_trained)
        ids: list[int] = []
        mask: list[int] = []
        start = 0
        for at, ((_, is_trained), piece) in enumerate(zip(spans, pieces, strict=True)):
            start = len(ids) if at == first else start
            more = [*piece]
            if not self.template.is_used and at == len(spans) - 1 and end is not None:
                more.append(end)
            ids += more
            trained = int(is_trained)
            mask += [0] * (len(more) - 1) + [trained] * bool(more) if text.only_ends else [trained] * len(more)
        texts = ["".join(piece for piece, _ in part) for part in (spans[:first], spans[first:])]
        expanded = self.media.expand(ids, text.shown, place)
        if text.shown:
            mask = [trained for trained, count in zip(mask, expanded.counts, strict=True) for _ in range(count)]
            start = sum(expanded.counts[:start])
        return RowTokens(expanded.ids[:start], expanded.ids[start:], mask[start:], expanded.media, texts[0], texts[1])


def units_of(
    batch: Batch, rows: Sequence[int], columns: Sequence[str], *, share_prefix: bool, mask: Tensor | None = None
) -> MicroBatch:
    """`rows` of a batch as one micro-batch of prompt units that carry `columns` (see `Batch.unit_rows` and `Batch.shares`)."""
    units = batch.unit_rows(rows, share_prefix=share_prefix)
    whole = [(unit, tuple(range(len(size.response_tokens)))) for unit, size in enumerate(units.sizes)]
    [share] = batch.shares(units, [[whole]], columns, mask=mask)
    return next(iter(share))


def behind_prompt(sample: Sample, other: Sample) -> Sample:
    """The response of `sample` behind the prompt of `other`."""
    moved_media = (media.moved(len(other.prompt_ids)) for media in sample.response_media)
    media, extra = [*other.prompt_media, *moved_media], of_responses(sample.extra)
    return replace(sample, prompt_ids=other.prompt_ids, media=media, extra=extra)


def _from_json(value: Any) -> Any:
    """A list of messages that is written as JSON text, as a cell of a table has it; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
