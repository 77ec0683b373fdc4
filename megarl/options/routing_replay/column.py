"""The column `routes`: which experts each token went to in every layer that has experts.

A token column (`data/columns.py`) `[tokens, expert layers, k]` of uint8, or of int16 for 256 experts and more. A choice that
is not known is the model's own.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.data.columns import Column, TokenColumn, TokenRules, unknown

Routes = npt.NDArray[Any]


def compact(experts: npt.NDArray[Any], num_experts: int) -> Routes:
    """Integers `[..., k]` as routes; a token and layer whose k numbers are no k different experts has no known choice."""
    dtype = np.uint8 if num_experts <= unknown(np.uint8) else np.int16
    ordered = np.sort(experts, axis=-1)
    is_known = (ordered[..., 0] >= 0) & (ordered[..., -1] < num_experts) & (np.diff(ordered) > 0).all(-1)
    return np.where(is_known[..., None], experts, unknown(dtype)).astype(dtype)


def known(routes: Routes) -> npt.NDArray[np.bool_]:
    """bool `[tokens, layers]`: where the choice is known."""
    return np.asarray(routes[..., 0] != unknown(routes.dtype))


def agreed(routes: Sequence[Routes]) -> Routes:
    """The choices on which all of `routes`, of the same tokens, agree in whatever order; the others are not known."""
    first, *others = routes
    agree = np.ones(first.shape[:2], np.bool_)
    for other in others:
        agree &= (np.sort(first) == np.sort(other)).all(-1)
    return np.where(agree[..., None], first, unknown(first.dtype)).astype(first.dtype)


def of_one_version(routes: Routes, prompt_tokens: int, sampled_mask: Sequence[int], versions: Sequence[int]) -> Routes:
    """The routes of a pass under the last of `versions`, without those of the tokens before which other weights sampled.

    A token sampled by older weights was computed anew, with what came before it, when the weights had changed: the choice that
    led to it is gone, and that of the newer weights is none of its own. `routes` `[T, layers, k]` are of prompt and response.
    """
    others = np.array(sampled_mask, np.bool_) & (np.array(versions, np.int64) != (versions[-1] if len(versions) else 0))
    left = routes.copy()
    left[prompt_tokens - 1 + others.nonzero()[0]] = unknown(routes.dtype)
    return left


def kept(first: Routes | None, second: Routes | None, *, same_weights: bool) -> Routes | None:
    """The routes `second` of a turn, which are of everything before it, too; what was chosen first under the same weights
    stays."""
    if first is None or second is None or not same_weights:
        return second
    routes, is_known = second.copy(), known(first)
    routes[: len(first)][is_known] = first[is_known]
    return routes


def to_json(routes: Routes) -> dict[str, Any]:
    """A JSON-able form; `from_json` reads it back."""
    return {"shape": list(routes.shape), "dtype": routes.dtype.name, "base64": base64.b64encode(routes.tobytes()).decode()}


def from_json(given: Mapping[str, Any]) -> Routes:
    """Routes from `to_json`'s answer."""
    flat = np.frombuffer(base64.b64decode(given["base64"]), {"uint8": np.uint8, "int16": np.int16}[given["dtype"]])
    return flat.reshape(given["shape"])


class ReplayCounts(NamedTuple):
    """Choices (an expert of a token in a layer) that were replayed, and those of them that the router would not make now."""

    replayed: int = 0
    differing: int = 0


@dataclass(frozen=True)
class RecordedRoutes:
    """Records that the first rank of a pipeline stage has of its replica's responses, each behind its prompt.

    `rows` int64 `[R]` of the batch, `lengths` int64 `[R]` tokens of each with its prompt, `layers` which of the model's expert
    layers the stage has, `routes` `[sum of lengths, stage's layers, k]`.
    """

    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    layers: tuple[int, ...]
    routes: Routes

    def by_row(self) -> Iterator[tuple[int, Routes]]:
        """Each row with its routes in these layers."""
        ends = np.cumsum(self.lengths)
        for row, start, end in zip(self.rows.tolist(), (ends - self.lengths).tolist(), ends.tolist(), strict=True):
            yield row, self.routes[start:end]


def joined(parts: Sequence[RecordedRoutes]) -> dict[int, Routes]:
    """By row the routes in all layers, which the stages of its replica recorded."""
    layers = 1 + max((layer for part in parts for layer in part.layers), default=-1)
    whole: dict[int, Routes] = {}
    for part in parts:
        for row, routes in part.by_row():
            of_row = whole.setdefault(row, np.full((len(routes), layers, routes.shape[2]), unknown(routes.dtype), routes.dtype))
            of_row[:, list(part.layers)] = routes
    return whole


def missing(routes: TokenColumn) -> float:
    """The share of choices in a batch that are unknown, of the tokens that a model reads: all but each response's last one."""
    starts = routes.responses.starts
    last = starts[1:][np.diff(starts) > 0] - 1
    parts = known(routes.prompts.values), np.delete(known(routes.responses.values), last, axis=0)
    return 1.0 - sum(int(part.sum()) for part in parts) / max(sum(part.size for part in parts), 1)


COLUMN = Column(
    "routes",
    then=kept,
    to_json=to_json,
    from_json=from_json,
    is_asked=lambda config: config.routing_replay == "engine",
    tokens=TokenRules(agreed, of_one_version),
)
