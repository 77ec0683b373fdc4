"""What a chat template writes between two turns of the policy, as token ids.

Only that piece is ever rendered and tokenised: the turns before it stay the ids that they are. A template may therefore
write an earlier turn otherwise once more follows (thinking taken out, for one) without anything changing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2

from megarl.data.chat import special_tokens
from megarl.errors import EpisodeError
from megarl.rollout.engines.protocol import Generation

TextMessage = dict[str, str]

_TURN, _TOLD = "\ue000the turn\ue001", "megarl-told"
"""Stand for what the policy said and was told; nothing that a template writes by itself."""

CHARACTERS_PER_TOKEN = 32
"""What is longer than so many characters per allowed token is cut before it is tokenised."""


class TurnTemplate:
    """The tokenizer's chat template, from the end of one turn of the policy to where its next one begins."""

    def __init__(self, tokenizer: Any, schemas: Sequence[dict[str, Any]], observation_role: str) -> None:
        """`schemas`: the tools, as the template's `tools=` takes them; `observation_role`: the role of what the policy is told.

        Raises:
            EpisodeError: there is no template, or it does not write such messages.
        """
        if not tokenizer.chat_template:
            raise EpisodeError(
                "rollout.episode.kind needs a chat template for turns that follow one another, but the model's tokenizer has "
                "none; it must be 'single'"
            )
        self.tokenizer, self._schemas = tokenizer, list(schemas)
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

    def opening(self, messages: Sequence[TextMessage]) -> tuple[str, list[int]]:
        """A conversation up to where the policy's first turn begins: its text and ids."""
        text = self._render(messages, ask=True)
        return text, self._ids(text)

    def turn_text(self, generation: Generation) -> str:
        """The text of a sampled turn without the token that ended it."""
        ids = generation.response_ids
        ended = generation.finish_reason == "stop" and ids and ids[-1] in self._special_ids
        return str(self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False))

    def between(self, messages: Sequence[TextMessage], last_sampled: int) -> list[int]:
        """The ids that follow a turn whose last token is `last_sampled`, up to where the next turn begins.

        The token that ends a turn is there once: the sampled one, or else the template's. Special tokens spelled out in
        `messages` are broken up by a space, so that what a tool says cannot end its turn and begin another.
        """
        harmless = [{**message, "content": self._harmless(message["content"])} for message in messages]
        ids = self._ids(self._after_turn(harmless, ask=True))
        return ids[1:] if self._ends_turns and last_sampled in self._special_ids else ids

    def cut(self, text: str, max_tokens: int, characters: int | None = None) -> tuple[str, bool]:
        """`text`, or its first `max_tokens` tokens and a notice; and whether it was cut.

        Args:
            text: anything, or the beginning of something that has so many `characters`.
            max_tokens: 1 or more.
            characters: of the whole; None: `text` is all of it.
        """
        whole = len(text) if characters is None else characters
        head = _encodable(text[: max_tokens * CHARACTERS_PER_TOKEN])
        encoded = self.tokenizer(head, add_special_tokens=False, return_offsets_mapping=self.tokenizer.is_fast)
        ids = encoded["input_ids"]
        if len(ids) <= max_tokens and len(head) == whole:
            return head, False
        if len(ids) > max_tokens:
            fast = self.tokenizer.is_fast
            head = head[: encoded["offset_mapping"][max_tokens][0]] if fast else self.tokenizer.decode(ids[:max_tokens])
        return f"{head}\n[cut: {len(head)} of {whole} characters]", True

    def _after_turn(self, messages: Sequence[TextMessage], *, ask: bool) -> str:
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}, *messages]
        _, turn, after = self._render(conversation, ask=ask).partition(_TURN)
        if not turn:
            raise EpisodeError("the tokenizer's chat template does not write what an assistant said word for word")
        return after

    def _render(self, conversation: Sequence[TextMessage], *, ask: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(conversation), tools=self._schemas or None, add_generation_prompt=ask, tokenize=False
                )
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in conversation)
            raise EpisodeError(f"the tokenizer's chat template refuses a conversation of the roles {roles}: {error}") from None

    def _harmless(self, text: str) -> str:
        for token in self._special_texts:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(_encodable(text), add_special_tokens=False)["input_ids"])


def _encodable(text: str) -> str:
    """`text` with a question mark for every lone surrogate, of which there are no tokens."""
    return text.encode(errors="replace").decode()
