"""Tokens that a chat template writes between two turns of the policy, as token ids.

Only that piece is ever rendered and tokenised: the turns before it stay the ids that they are. A template may therefore
write an earlier turn otherwise once more follows (thinking taken out, for one) without anything changing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from megarl.data.chat import special_tokens
from megarl.data.chat_rendering import TemplateError, render
from megarl.data.left_out import LeftOut
from megarl.data.media import Media
from megarl.data.row_media import ModelMedia
from megarl.data.told import KeptPicture, PicturedText
from megarl.errors import EpisodeError
from megarl.rollout.engines.protocol import Generation

ToldMessage = dict[str, Any]
"""A chat message whose `content` is a PicturedText; its other fields are text."""

_TURN, _TOLD = "\ue000the turn\ue001", "megarl-told"
"""Stand for what the policy said and was told; nothing that a template writes by itself."""

CHARACTERS_PER_TOKEN = 32
"""Characters per allowed token, beyond which a text is cut before it is tokenised."""


@dataclass(frozen=True)
class ToldTokens:
    """Words told to the policy, as ids, and the pictures among them, their places counted from the first id."""

    ids: list[int]
    media: list[Media]


class TurnTemplate:
    """The tokenizer's chat template, from the end of one turn of the policy to where its next one begins."""

    def __init__(
        self,
        tokenizer: Any,
        schemas: Sequence[dict[str, Any]],
        observation_role: str,
        pictures: ModelMedia | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """`schemas`: the tools, as the template's `tools=` takes them; `observation_role`: the role of what the policy is told;
        `pictures`: how the model takes them; None: it takes none. `template_args`: options of the template.

        Raises:
            EpisodeError: there is no template, or it does not write such messages.
        """
        if not tokenizer.chat_template:
            raise EpisodeError(
                "rollout.episode.kind needs a chat template for turns that follow one another, but the model's tokenizer has "
                "none; it must be 'single'"
            )
        self.tokenizer, self._schemas, self._pictures = tokenizer, list(schemas), pictures
        self._args = dict(template_args or {})
        self.left_out: LeftOut | None = None
        """Warns of what the template leaves out of messages; None: nobody looks."""
        added = tokenizer.added_tokens_decoder
        self._special_ids = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self._special_texts = sorted((token for token in special_tokens(tokenizer) if len(token) > 1), key=len, reverse=True)
        end = self._ids(self._after_turn([], ask=False))
        self._ends_turns = bool(end) and end[0] in self._special_ids
        if _TOLD not in self._after_turn([{"role": observation_role, "name": "tool", "content": _TOLD}], ask=True):
            raise EpisodeError(
                f"the tokenizer's chat template leaves out messages of role '{observation_role}', which "
                "rollout.episode.kind needs; use a model whose template writes them"
            )

    def with_args(self, args: Mapping[str, Any] | None) -> TurnTemplate:
        """The same template under further options, which go before its own."""
        if not args:
            return self
        other = copy(self)
        other._args = {**self._args, **args}
        return other

    def opening(self, messages: Sequence[ToldMessage], *, system: str | None = None) -> tuple[str, ToldTokens]:
        """A conversation up to where the policy's first turn begins: its text, with a placeholder for each picture, and ids.

        Special tokens spelled out in `messages` are broken up, as `between` does. `system` is the config's own message before
        them, in which they stay.

        Raises:
            EpisodeError: a text has a token that stands for a picture, or the template leaves out pictures.
        """
        for text in (system or "", *(piece for piece in _pieces(messages) if isinstance(piece, str))):
            for token in self._pictures.reserved if self._pictures is not None else ():
                if token in text:
                    raise EpisodeError(f"a message has the text '{token}', which stands for a picture")
        system_message = [{"role": "system", "content": system}] if system is not None else []
        text = self._render([*system_message, *(_rendered(message, self._harmless) for message in messages)], ask=True)
        return text, self._with_pictures(self._ids(text), messages)

    def conversation(self, messages: Sequence[ToldMessage]) -> ToldTokens:
        """A whole conversation as the template writes it, up to where the policy's next turn begins.

        Special tokens spelled out in what the policy was told are broken up, as `between` does; in what an assistant said,
        which the policy may have sampled, they stay.

        Raises:
            EpisodeError: the template refuses the messages.
        """
        changed = [_rendered(message, str if message["role"] == "assistant" else self._harmless) for message in messages]
        return self._with_pictures(self._ids(self._render(changed, ask=True)), messages)

    def turn_text(self, generation: Generation) -> str:
        """The text of a sampled turn without the token that ended it."""
        ids = generation.response_ids
        ended = generation.finish_reason == "stop" and ids and ids[-1] in self._special_ids
        return self.sampled_text(ids[:-1] if ended else ids)

    def sampled_text(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def between(self, messages: Sequence[ToldMessage], last_sampled: int) -> ToldTokens:
        """The ids that follow a turn whose last token is `last_sampled`, up to where the next turn begins.

        The token that ends a turn is there once: the sampled one, or else the template's. Special tokens spelled out in
        `messages` are broken up by a space, so that what a tool says cannot end its turn and begin another.

        Raises:
            EpisodeError: the template leaves out pictures.
        """
        ids = self._ids(self._after_turn([_rendered(message, self._harmless) for message in messages], ask=True))
        return self._with_pictures(ids[1:] if self._ends_turns and last_sampled in self._special_ids else ids, messages)

    def _with_pictures(self, ids: list[int], messages: Sequence[ToldMessage]) -> ToldTokens:
        if self._pictures is None:
            return ToldTokens(ids, [])
        shown = [piece for piece in _pieces(messages) if not isinstance(piece, str)]
        try:
            expanded = self._pictures.expand(ids, shown)
        except ValueError as error:
            roles = ", ".join(sorted({message["role"] for message in messages}))
            raise EpisodeError(
                f"the tokenizer's chat template does not write the pictures in messages of the roles {roles}: {error}; use a "
                "model whose template writes them"
            ) from None
        return ToldTokens(expanded.ids, expanded.media)

    def cut(self, told: PicturedText, max_tokens: int, characters: int | None = None) -> tuple[PicturedText, bool]:
        """`told`, or the first `max_tokens` tokens of its text, the pictures in it and a notice; and whether it was cut.

        Args:
            told: anything, or the beginning of something whose text has so many `characters`.
            max_tokens: 1 or more; pictures do not count.
            characters: of the whole; None: `told` is all of it.
        """
        text = told.text
        whole = len(text) if characters is None else characters
        head = _encodable(text[: max_tokens * CHARACTERS_PER_TOKEN])
        encoded = self.tokenizer(head, add_special_tokens=False, return_offsets_mapping=self.tokenizer.is_fast)
        ids = encoded["input_ids"]
        if len(ids) <= max_tokens and len(head) == whole:
            return replace(told, text=head), False
        if len(ids) > max_tokens:
            fast = self.tokenizer.is_fast
            head = head[: encoded["offset_mapping"][max_tokens][0]] if fast else self.tokenizer.decode(ids[:max_tokens])
        left = told.beginning(len(head))
        return replace(left, text=f"{head}\n[cut: {len(head)} of {whole} characters]"), True

    def _after_turn(self, messages: Sequence[dict[str, Any]], *, ask: bool) -> str:
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}, *messages]
        _, turn, after = self._render(conversation, ask=ask, own=2).partition(_TURN)
        if not turn:
            raise EpisodeError("the tokenizer's chat template does not write what an assistant said word for word")
        return after

    def _render(self, conversation: Sequence[dict[str, Any]], *, ask: bool, own: int = 0) -> str:
        if self.left_out is not None and ask:
            self.left_out.check(conversation, "a request", tools=self._schemas, args=self._args, own=own)
        try:
            return render(self.tokenizer, conversation, self._schemas, ask=ask, args=self._args)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in conversation)
            raise EpisodeError(f"the tokenizer's chat template refuses a conversation of the roles {roles}: {error}") from None

    def _harmless(self, text: str) -> str:
        for token in self._special_texts:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(_encodable(text), add_special_tokens=False)["input_ids"])


def _pieces(messages: Sequence[ToldMessage]) -> Iterator[str | KeptPicture]:
    return (piece for message in messages for piece in message["content"].pieces)


def _rendered(message: ToldMessage, change: Callable[[str], str]) -> dict[str, Any]:
    """`message` as a template takes it, with `change` made to its texts."""
    content: PicturedText = message["content"]
    if not content.pictures:
        return {**message, "content": change(content.text)}
    parts = [{"type": "text", "text": change(p)} if isinstance(p, str) else {"type": "image"} for p in content.pieces]
    return {**message, "content": parts}


def _encodable(text: str) -> str:
    """`text` with a question mark for every lone surrogate, of which there are no tokens."""
    return text.encode(errors="replace").decode()
