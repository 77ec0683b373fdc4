"""Keys and values of conversations between their turns, in the embedded engine: the next turn computes what is new alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache


@dataclass(frozen=True)
class KeptTurn:
    """The keys and values that the model computed for `ids`: a cache of one row, without padding."""

    ids: list[int]
    cache: DynamicCache

    @property
    def nbytes(self) -> int:
        """Size of the keys and values."""
        return sum(part.nbytes for layer in self.cache.layers for part in (layer.keys, layer.values) if part is not None)


class TurnCache:
    """At most `max_bytes` of them, those used last. Whoever changes the weights must `clear` it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._kept: dict[str, KeptTurn] = {}  # by conversation, the one used last at the end

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, conversation: str, ids: Sequence[int]) -> KeptTurn | None:
        """Take what is kept of the tokens that `ids` begin with, all but one at most; None: nothing. It is then no
        longer kept."""
        turn = self._remove(conversation)
        if turn is None:
            return None
        pairs = zip(turn.ids, ids[:-1], strict=False)
        common = next((at for at, (had, requested) in enumerate(pairs) if had != requested), min(len(turn.ids), len(ids) - 1))
        if not common:
            return None
        if common < len(turn.ids):
            turn.cache.crop(common)
        return KeptTurn(list(ids[:common]), turn.cache)

    def keep(self, conversation: str, turn: KeptTurn) -> None:
        """Keep it in place of what there is of the conversation; those used longest ago make room."""
        self._remove(conversation)
        while self._kept and self.nbytes + turn.nbytes > self.max_bytes:
            self._remove(next(iter(self._kept)))
        if turn.nbytes <= self.max_bytes:
            self._kept[conversation] = turn
            self.nbytes += turn.nbytes

    def end(self, conversations: Iterable[str]) -> None:
        """These have no further turn."""
        for conversation in conversations:
            self._remove(conversation)

    def clear(self) -> None:
        """Keep nothing."""
        self._kept, self.nbytes = {}, 0

    def _remove(self, conversation: str) -> KeptTurn | None:
        turn = self._kept.pop(conversation, None)
        self.nbytes -= turn.nbytes if turn is not None else 0
        return turn


def refusal(config: Any) -> str | None:
    """Why the cache of a transformers model cannot be cut back to the tokens that stayed; None: it can."""
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return "the model has layers with linear attention, whose state after a token cannot be taken back"
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        return "the model's indexers keep keys of their own"
    if any("compressed" in kind for kind in (getattr(config, "layer_types", None) or ())):
        return "the model's compressed keys cannot be cut back"
    return "the model takes pictures" if config.get_text_config() is not config else None
