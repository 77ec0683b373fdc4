"""Conversations of one shape, rendered once: the same roles and keys, other contents.

A shape is learnt with contents that note what the template asks of them. Where it only writes them, or asks nothing but what
`Noted` can answer, such as whether they hold `</think>`, its text for other contents of which the same is true has theirs in
the same places. Other conversations are rendered.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.data.chat import ChatMessage
from megarl.data.turn_spans import Conversation, TrainedText, TurnSpans
from megarl.errors import DataError

Fact = tuple[str, Any, bool]
"""A question about a content, its argument and the answer."""
Cut = Callable[[TurnSpans, Conversation], list[list[TrainedText]]]
PLAIN_KEYS = {"role", "content", "weight"}
MOST_SHAPES = 2_000
LEARNT_AFTER = 3
"""Conversations of a shape that are rendered before it is learnt, which takes longer than rendering one."""
SAMPLES = ("megarl{}content", "megarl{} \"quoted\", \\ {{ and }} & 'é'\n\n- 12 % <b>of</b>\tit\n1content")
"""Contents that shapes are learnt with, the second with what is often escaped or changed."""
QUESTIONS: dict[str, Callable[[str, Any], bool]] = {
    "in": lambda content, part: part in content,
    "starts": lambda content, part: content.startswith(part),
    "ends": lambda content, part: content.endswith(part),
    "equals": lambda content, other: content == other,
}
"""What may be asked of a content, but for its spaces, which `_is_plain` sees to."""


@dataclass
class _Notes:
    """Answers that a template was given, and whether it did something else to a content."""

    facts: list[set[Fact]]
    is_opaque: bool = False


class Noted(str):
    """A content that notes what is asked of it. One that is no longer a whole content notes only that it was asked."""

    notes: _Notes
    number: int | None

    @classmethod
    def of(cls, text: str, notes: _Notes, number: int | None) -> Noted:
        """The content with that number; None: of a text that one is a part of."""
        noted = cls(text)
        noted.notes, noted.number = notes, number
        return noted

    def _note(self, question: str, argument: Any, *, answer: bool) -> bool:
        if self.number is None or not isinstance(argument, str | tuple):
            self.notes.is_opaque = True
        else:
            self.notes.facts[self.number].add((question, argument, answer))
        return answer

    def _stripped(self, characters: str | None) -> Noted:
        if self.number is None or (characters is not None and characters.strip()):
            self.notes.is_opaque = True
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return Noted.of(str.__add__(self, other), self.notes, None)

    def __radd__(self, other: str) -> str:
        return Noted.of(str.__add__(other, self), self.notes, None)

    def __contains__(self, part: object) -> bool:
        return self._note("in", part, answer=str.__contains__(self, part))  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._note("equals", str.__str__(other), answer=str.__eq__(self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __bool__(self) -> bool:
        return True  # no content of a shape is empty

    def startswith(self, part: Any, *places: Any) -> bool:
        return self._note("starts", part if not places else None, answer=str.startswith(self, part, *places))

    def endswith(self, part: Any, *places: Any) -> bool:
        return self._note("ends", part if not places else None, answer=str.endswith(self, part, *places))

    def strip(self, characters: str | None = None, /) -> str:
        return self._stripped(characters)

    def lstrip(self, characters: str | None = None, /) -> str:
        return self._stripped(characters)

    def rstrip(self, characters: str | None = None, /) -> str:
        return self._stripped(characters)

    def split(self, separator: Any = None, maxsplit: Any = -1) -> list[str]:  # type: ignore[override]
        if separator is None or separator in self:
            self.notes.is_opaque = True
        return [self]

    def __getattribute__(self, name: str) -> Any:
        if name in _OTHERS:
            self.notes.is_opaque = True
        return super().__getattribute__(name)

    def __len__(self) -> int:
        self.notes.is_opaque = True
        return str.__len__(self)

    def __getitem__(self, key: Any) -> str:
        self.notes.is_opaque = True
        return str.__getitem__(self, key)

    def __iter__(self) -> Any:
        self.notes.is_opaque = True
        return str.__iter__(self)

    def __mod__(self, value: Any) -> str:
        self.notes.is_opaque = True
        return str.__mod__(self, value)


_OTHERS = {name for name in dir(str) if not name.startswith("__")} - {
    "startswith",
    "endswith",
    "strip",
    "lstrip",
    "rstrip",
    "split",
}


@dataclass(frozen=True)
class _Shape:
    """Pieces by sample: texts, and the numbers of contents between them, and whether they are trained on."""

    samples: list[list[tuple[tuple[str | int, ...], bool]]]
    facts: list[tuple[int, list[Fact]]]
    """By the number of a content, what must be true of it."""

    def fits(self, contents: Sequence[str]) -> bool:
        return all(
            QUESTIONS[question](contents[number], argument) == answer
            for number, facts in self.facts
            for question, argument, answer in facts
        )

    def filled(self, contents: Sequence[str]) -> list[list[TrainedText]]:
        return [
            [
                ("".join([contents[piece] if isinstance(piece, int) else piece for piece in pieces]), is_trained)
                for pieces, is_trained in spans
            ]
            for spans in self.samples
        ]


@dataclass
class TurnShapes:
    """Cuts conversations into turns as `cut` does, with what it knows of their shapes."""

    turns: TurnSpans
    cut: Cut
    _known: dict[tuple[Any, ...], _Shape | None] = field(default_factory=dict)
    _seen: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        texts = sorted(map(re.escape, self.turns.ends.tokens), key=len, reverse=True)
        self._not_plain = re.compile("|".join((r"\x00", r"\x01", *texts)))

    def spans(self, conversation: Conversation) -> list[list[TrainedText]]:
        """The pieces of each sample.

        Raises:
            DataError: as `cut`.
        """
        key = _key(conversation)
        if key is None:
            return self.cut(self.turns, conversation)
        contents: list[str] = [message["content"] for message in conversation.messages]
        if key not in self._known and len(self._known) < MOST_SHAPES:
            self._seen[key] += 1
            if self._seen[key] > LEARNT_AFTER:
                self._known[key] = self._learn(conversation)
        shape = self._known.get(key)
        if shape is None or not self._is_plain(contents) or not shape.fits(contents):
            return self.cut(self.turns, conversation)
        return shape.filled(contents)

    def _is_plain(self, contents: Sequence[str]) -> bool:
        """Return whether no content is empty, begins or ends with a space or holds a special token."""
        joined = "\x02".join(contents)
        if self._not_plain.search(joined):
            return False
        return all(content and not content[0].isspace() and not content[-1].isspace() for content in contents)

    def _learn(self, conversation: Conversation) -> _Shape | None:
        """None: the template looks at contents, or refuses the shape."""
        learnt = [self._learn_with(conversation, sample) for sample in SAMPLES]
        first, second = learnt
        if first is None or second is None or first.samples != second.samples:
            return None
        facts: dict[int, set[Fact]] = {}
        for shape in (first, second):
            for number, of_content in shape.facts:
                facts.setdefault(number, set()).update(of_content)
        return replace(first, facts=[(number, sorted(its, key=repr)) for number, its in facts.items()])

    def _learn_with(self, conversation: Conversation, sample: str) -> _Shape | None:
        notes = _Notes([set() for _ in conversation.messages])
        texts = [sample.replace("{}", str(n), 1) for n in range(len(conversation.messages))]
        messages: list[ChatMessage] = [
            {**message, "content": Noted.of(text, notes, number)}
            for number, (message, text) in enumerate(zip(conversation.messages, texts, strict=True))
        ]
        try:
            samples = self.cut(self.turns, replace(conversation, messages=messages))
        except DataError:
            return None
        if notes.is_opaque:
            return None
        numbers = {text: number for number, text in enumerate(texts)}
        pattern = re.compile("(" + "|".join(sorted(map(re.escape, texts), key=len, reverse=True)) + ")")
        pieces = [
            [(tuple(numbers.get(piece, piece) for piece in pattern.split(text) if piece), trained) for text, trained in spans]
            for spans in samples
        ]
        return _Shape(pieces, [(number, list(facts)) for number, facts in enumerate(notes.facts) if facts])


def _key(conversation: Conversation) -> tuple[Any, ...] | None:
    """Equal for conversations of one shape; None: it is rendered."""
    shape: list[Any] = [conversation.after]
    for message in conversation.messages:
        content = message["content"]
        if type(content) is not str or not message.keys() <= PLAIN_KEYS:
            return None
        shape += [message["role"], message.get("weight")] if len(message) > 2 else [message["role"]]
    if conversation.args or conversation.tools:
        shape.append(json.dumps([conversation.args, conversation.tools], sort_keys=True, default=repr))
    try:
        hash(key := tuple(shape))
    except TypeError:
        return None
    return key
