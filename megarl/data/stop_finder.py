"""Finds the token at which the text of a response first has a stop text: token by token, as the policy samples them.

The text is what the tokenizer decodes of the response's own tokens, special ones written out. Bytes that are no whole character
yet decode to U+FFFD, which no stop text may have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.config.stop_checks import UNDECIDED, check_stops
from megarl.data.tokenize import load_tokenizer
from megarl.errors import ConfigError

Decode = Callable[[Sequence[int]], str]
"""The text of tokens."""

MOST_UNDECIDED = 8
"""Tokens that wait for the end of a character; it has four bytes at most."""
KEPT_TEXTS = 2**16
"""Texts of tokens, and of pairs, that are kept: most of what a policy says it says again."""


def decode_by(tokenizer: Any) -> Decode:
    """The texts of tokens by `tokenizer`, from which nothing is left out or cleaned up."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    kept = lru_cache(KEPT_TEXTS)(decode)
    return lambda ids: kept(tuple(ids)) if len(ids) <= 2 else decode(ids)


class ModelTexts:
    """Texts of tokens of the model in a folder, whose tokenizer is loaded once, when the first is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Decode] | None = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; from any thread.

        Raises:
            ModelError: the folder has none.
        """
        return self._load()[0]

    def decode(self) -> Decode:
        """Give the function that decodes; from any thread. Raises as `tokenizer`."""
        return self._load()[1]

    def _load(self) -> tuple[Any, Decode]:
        with self._lock:
            if self._loaded is None:
                tokenizer = load_tokenizer(self._folder)
                self._loaded = tokenizer, decode_by(tokenizer)
            return self._loaded


class StopFinder:
    """Looks for the first of `texts` in one response, whose tokens it is given one after the other."""

    def __init__(self, texts: Sequence[str], decode: Decode) -> None:
        self._texts, self._decode = tuple(texts), decode
        self._kept = max(map(len, self._texts), default=1) - 1
        self._tail = ""  # the last characters of the decided text: a stop may have begun in them
        self._ids: list[int] = []
        self._start = self._decided = 0  # what comes is decoded behind a few tokens: decoders look at neighbours

    def take(self, token: int) -> bool:
        """Take the next token; returns whether the text has a stop now."""
        self._ids.append(token)
        known, text = self._decode(self._ids[self._start : self._decided]), self._decode(self._ids[self._start :])
        if not text.startswith(known):  # of some tokenizers a byte changes what the bytes before it stand for
            self._tail, self._start, self._decided, known = "", 0, 0, ""
            text = self._decode(self._ids)
        text = self._tail + text[len(known) :]
        if not text.endswith(UNDECIDED) or len(self._ids) - self._decided > MOST_UNDECIDED:
            self._tail = text[len(text) - self._kept :] if self._kept < len(text) else text
            self._start, self._decided = self._decided, len(self._ids)
        return any(stop in text for stop in self._texts)

    def first(self, ids: Sequence[int]) -> int | None:
        """Take tokens up to the first one with which the text has a stop; returns how many it took, None: there is none."""
        return next((count for count, token in enumerate(ids, start=1) if self.take(token)), None)


def asked_stops(tokenizer: Any, stop: str | Sequence[str] | None, stop_token_ids: Sequence[int] | None) -> dict[str, Any]:
    """Stops of a call as those of the config are, checked; what is None stays so.

    Raises:
        ConfigError: names the argument.
    """
    texts = (stop,) if isinstance(stop, str) else stop
    given = tuple(texts or ()), tuple(stop_token_ids or ())
    check_stops("sample", *given)
    check_stops_of(tokenizer, "sample", *given)
    return {"stop": texts, "stop_token_ids": stop_token_ids}


def check_stops_of(tokenizer: Any, section: str, texts: Sequence[str], token_ids: Sequence[int]) -> None:
    """Refuse texts that `tokenizer` has no tokens for, and ids that are none of its tokens.

    Raises:
        ConfigError: names the field and the place in its list.
    """
    if not texts and not token_ids:
        return
    size, unknown = len(tokenizer), tokenizer.unk_token_id
    for index, text in enumerate(texts):
        if unknown is not None and unknown in tokenizer(text, add_special_tokens=False)["input_ids"]:
            reason = "cannot be encoded: the model's tokenizer has no token for a part of it"
            raise ConfigError.of(f"{section}.stop[{index}]", text, reason, allowed="a text that the model is able to write")
    for index, token in enumerate(token_ids):
        if token >= size:
            raise ConfigError.of(f"{section}.stop_token_ids[{index}]", token, allowed=f"below {size}, the tokenizer's size")
