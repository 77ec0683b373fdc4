"""The column `chosen_keys`: which keys each token's queries attend to, in every layer that has an indexer.

A token column (`data/columns.py`), uint8 `[tokens, indexers, W]`: bit p % 8 (the lowest is 0) of byte p // 8 says whether the
token at position p of the sequence is chosen. W is the bytes that the sequence's length takes, or that of the longest beside
it: an eighth of a byte for each token is less than numbers of 2,048 keys in 4 bytes each up to 65,536 tokens. Where all
bits are set the choice is not known, or all keys are chosen.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.config import Config
from megarl.data.columns import Column, TokenRules, unknown
from megarl.options.sparse_attention.section import indexer_of

Keys = npt.NDArray[np.uint8]
UNKNOWN = unknown(np.uint8)


def packed(chosen: npt.NDArray[np.bool_]) -> Keys:
    """`[..., keys]` as bits `[..., W]`."""
    return np.packbits(chosen, axis=-1, bitorder="little")


def known(keys: Keys) -> npt.NDArray[np.bool_]:
    """bool `[tokens, indexers]`: where a choice is known that is not of all keys."""
    return np.asarray((keys != UNKNOWN).any(-1))


def alike(of_sequences: Sequence[Keys]) -> list[Keys]:
    """The same choices, all as wide as the widest; keys behind a sequence's own are not chosen."""
    width = max((keys.shape[-1] for keys in of_sequences), default=0)
    return [keys if keys.shape[-1] == width else _widened(keys, width) for keys in of_sequences]


def _widened(keys: Keys, width: int) -> Keys:
    more = np.where(known(keys)[..., None], 0, UNKNOWN).astype(np.uint8)
    return np.concatenate([keys, np.broadcast_to(more, (*more.shape[:-1], width - keys.shape[-1]))], axis=-1)


def agreed(of_sequences: Sequence[Keys]) -> Keys:
    """The choices on which all, of the same tokens, agree; the others are not known."""
    first, *others = alike(of_sequences)
    agree = np.ones(first.shape[:2], np.bool_)
    for other in others:
        agree &= (first == other).all(-1)
    return np.where(agree[..., None], first, UNKNOWN).astype(np.uint8)


def of_one_version(keys: Keys, prompt_tokens: int, sampled_mask: Sequence[int], versions: Sequence[int]) -> Keys:
    """The choices of a pass under the last of `versions`, without those of the tokens before which other weights sampled."""
    others = np.array(sampled_mask, np.bool_) & (np.array(versions, np.int64) != (versions[-1] if len(versions) else 0))
    left = keys.copy()
    left[prompt_tokens - 1 + others.nonzero()[0]] = UNKNOWN
    return left


def kept(first: Keys | None, second: Keys | None, *, same_weights: bool) -> Keys | None:
    """The choices `second` of a turn, which are of everything before it, too; those that were made first under the same weights
    stay."""
    if first is None or second is None or not same_weights:
        return second
    begun, keys = alike([first, second])
    is_known = known(begun)
    keys = keys.copy()
    keys[: len(begun)][is_known] = begun[is_known]
    return keys


def to_json(keys: Keys) -> dict[str, Any]:
    """A JSON-able form; `from_json` reads it back."""
    return {"shape": list(keys.shape), "base64": base64.b64encode(keys.tobytes()).decode()}


def from_json(given: Mapping[str, Any]) -> Keys:
    """Choices from `to_json`'s answer."""
    return np.frombuffer(base64.b64decode(given["base64"]), np.uint8).reshape(given["shape"])


def _is_asked(config: Config) -> bool:
    return indexer_of(config.policy).replay == "engine"


COLUMN = Column(
    "chosen_keys",
    then=kept,
    to_json=to_json,
    from_json=from_json,
    is_asked=_is_asked,
    tokens=TokenRules(agreed, of_one_version, alike),
)
