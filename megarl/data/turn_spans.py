"""Conversations in pieces: which text of a rendered conversation is an assistant's turn that is trained on.

A turn is what the assistant writes behind the prompt that asks for it, up to and with the token that ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.data.chat import ChatMessage, ChatTemplate, RowTools
from megarl.data.rows import RowPlace
from megarl.data.supplied import turn_behind
from megarl.data.turn_ends import TurnEnds
from megarl.errors import DataError

TrainedText = tuple[str, bool]
"""A piece of text, and whether the model is trained on it."""
WEIGHT = "weight"
"""Key of a message in OpenAI's files for fine-tuning: 0 leaves an assistant's turn out of the loss."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and what their template is given beside them."""

    messages: Sequence[ChatMessage]
    place: RowPlace
    tools: RowTools | None = None
    """Of the row; None: those of the run."""
    args: Mapping[str, Any] | None = None
    """The row's own options of the template."""
    after: int = 0
    """Turns before this message are not trained on."""

    @cached_property
    def turns(self) -> list[int]:
        """The assistant turns to train on.

        Raises:
            DataError: there is none, the first message is one, or a weight is neither 0 nor 1.
        """
        place, messages = self.place, self.messages
        if messages and messages[0]["role"] == "assistant":
            raise DataError(f"{place} begins with an assistant turn, but there must be a message that it answers")
        weights = [_weight(message, at, place) for at, message in enumerate(messages)]
        turns = [at for at in range(self.after, len(messages)) if messages[at]["role"] == "assistant"]
        if not any(weights[at] for at in turns):
            why = ": each of them has weight 0" if turns else ""
            raise DataError(f"{place} has no assistant turn to train on{why}")
        return [at for at in turns if weights[at]]

    @cached_property
    def shown(self) -> list[ChatMessage]:
        """The messages as the template gets them."""
        return [
            {key: value for key, value in message.items() if key != WEIGHT} if WEIGHT in message else message
            for message in self.messages
        ]


@dataclass(frozen=True)
class PromptedTurn:
    """An assistant's turn behind the prompt that asks for it."""

    prompt: str
    body: str
    end: str


class TurnSpans:
    """Cuts conversations into turns."""

    def __init__(self, template: ChatTemplate, advice: str) -> None:
        """`advice` ends the sentence that refuses a template which renders earlier turns otherwise once others follow."""
        self.template, self._advice = template, advice

    @cached_property
    def ends(self) -> TurnEnds:
        """The tokens that end turns."""
        return TurnEnds(self.template)

    def together(self, conversation: Conversation) -> list[TrainedText]:
        """The whole conversation in pieces, up to the end of its last trained turn; these turns are trained on.

        A line break that the template writes behind an end token is not.

        Raises:
            DataError: there is no such turn, its end cannot be told, or the template renders the beginning of the
                conversation otherwise when more follows, so that no piece of it is a turn.
        """
        spans: list[TrainedText] = []
        turns = [self._turn(conversation, at) for at in conversation.turns]
        done = ""
        for number, (at, turn) in enumerate(zip(conversation.turns, turns, strict=True)):
            if not turn.prompt.startswith(done):
                before = turns[number - 1]
                # where the end of a turn depends on what follows, the one inside the conversation counts
                start = len(before.prompt + before.body)
                end = self.ends.stop_at(turn.prompt[start:]) if turn.prompt.startswith(before.prompt + before.body) else None
                if end is None:
                    raise self._rewritten(conversation, at)
                spans[-1] = (before.body + end, True)
                done = before.prompt + before.body + end
            spans += [(turn.prompt[len(done) :], False), (turn.body + turn.end, True)]
            done = turn.prompt + turn.body + turn.end
        return spans

    def each(self, conversation: Conversation, *, only_last: bool = False) -> list[list[TrainedText]]:
        """Every trained turn, or the last one, behind the prompt that asks for it.

        Raises:
            DataError: as `together`, but for a template that renders turns otherwise when more follows.
        """
        turns = [self._turn(conversation, at) for at in conversation.turns[-1 if only_last else 0 :]]
        return [[(turn.prompt, False), (turn.body + turn.end, True)] for turn in turns]

    def _turn(self, conversation: Conversation, at: int) -> PromptedTurn:
        messages, place = conversation.shown, conversation.place
        given: dict[str, Any] = {"tools": conversation.tools, "args": conversation.args}
        prompt = self.template.render(messages[:at], place, ask=True, **given)
        rendered = self.template.render(messages[: at + 1], place, ask=False, **given)
        text = turn_behind(prompt, rendered, messages[at], f"{place}: message {at} (counted from 0)")
        if text is None:
            raise self._rewritten(conversation, at)
        body, end = self.ends.split(text)
        if end is None:
            following = messages[at + 1] if at + 1 < len(messages) else None
            ended = self.ends.ended(body, messages[at], following)
            if ended is None:
                raise self._endless(conversation, at, following)
            body, end = ended
        return PromptedTurn(prompt, body, end)

    def _rewritten(self, conversation: Conversation, at: int) -> DataError:
        return DataError(
            f"{conversation.place}: the chat template renders the messages before message {at} (counted from 0) otherwise once "
            f"that one follows, so the tokens of each turn are unknown; {self._advice}"
        )

    def _endless(self, conversation: Conversation, at: int, following: ChatMessage | None) -> DataError:
        if following is None:
            return DataError(
                f"{conversation.place}: the end of an assistant's turn cannot be told: the chat template writes no token "
                "behind it, and neither the tokenizer nor generation_config.json names an end token; name one there "
                "(eos_token_id)"
            )
        return DataError(
            f"{conversation.place}: the end of message {at} (counted from 0) cannot be told: the chat template writes no token "
            f"behind it, and generation does not stop where the {following['role']} begins; {self._advice}"
        )


def _weight(message: ChatMessage, at: int, place: RowPlace) -> bool:
    """Return whether the message counts, if it is a turn to train on."""
    weight = message.get(WEIGHT)
    if weight is None:
        return True
    if weight not in (0, 1):
        raise DataError(
            f"{place}: message {at} (counted from 0) has {weight!r:.80} under '{WEIGHT}'; the weight of a message must be 0 "
            "or 1"
        )
    if weight and message["role"] != "assistant":
        raise DataError(
            f"{place}: message {at} (counted from 0) is of the {message['role']} and has weight 1, but only assistant turns "
            "are trained on; its weight must be 0 or left out"
        )
    return bool(weight)
