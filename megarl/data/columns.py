"""Columns that options add to responses, by name: a value of a whole response, or an array with an entry per token.

An option declares its column once, as `COLUMN` of its `column.py`. What holds responses (`Generation.extra`, `Sample.extra`, a
batch's, a share's and a stream's) has values by name, calls the functions below, and knows no option.

A token column is an array `[tokens, ...]` of prompt and response. Where nothing is known it has the largest value of its
type, or NaN if it has floats. It is of the sequence alone: a response whose tokens change loses it, and tokens that have it are
not shared between responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megarl.config import Config
from megarl.option_list import parts

Extra = Mapping[str, Any]
"""Values by the name of their column; a column that has none is not in it."""
TokenValues = npt.NDArray[Any]
"""Those of a token column, `[tokens, ...]`."""


@dataclass(frozen=True)
class TokenRules:
    """The rules of a token column.

    `agreed`: of arrays of the same tokens, what they agree on; a prompt that responses share has this. `of_episode`: of the
    values of a whole episode, tokens of its prompt, sampled mask and versions, those that are its own. `alike`: the same arrays
    with shapes that differ in the number of tokens alone.
    """

    agreed: Callable[[Sequence[TokenValues]], TokenValues]
    of_episode: Callable[[TokenValues, int, Sequence[int], Sequence[int]], TokenValues]
    alike: Callable[[Sequence[TokenValues]], Sequence[TokenValues]] = list


@dataclass(frozen=True)
class Column:
    """A column by its `name`, which is also its key in JSON.

    `then(first, second, same_weights=...)` gives the value of tokens that were sampled in two pieces from those of the pieces,
    which ended under the same weights or not; None stands for no value. `is_asked`: whether engines are asked for it in a run.
    """

    name: str
    then: Callable[..., Any]
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]
    is_asked: Callable[[Config], bool] = lambda config: False
    tokens: TokenRules | None = None


@cache
def columns() -> Mapping[str, Column]:
    """The columns of the installed options."""
    return {module.COLUMN.name: module.COLUMN for module in parts("column")}


def asked_columns(config: Config) -> frozenset[str]:
    """Names of the columns that a run asks its engines for."""
    return frozenset(name for name, column in columns().items() if column.is_asked(config))


def joined(first: Extra, second: Extra, *, same_weights: bool) -> dict[str, Any]:
    """The values of tokens that were sampled in two pieces, both ended under the same weights or not."""
    both = ((column, first.get(name), second.get(name)) for name, column in columns().items())
    values = {column.name: column.then(earlier, later, same_weights=same_weights) for column, earlier, later in both}
    return {name: value for name, value in values.items() if value is not None}


def of_tokens(extra: Extra) -> dict[str, TokenValues]:
    """Restrict to token columns."""
    return {name: value for name, value in extra.items() if columns()[name].tokens is not None}


def of_responses(extra: Extra) -> dict[str, Any]:
    """Restrict to values of whole responses: what is left where tokens change."""
    return {name: value for name, value in extra.items() if columns()[name].tokens is None}


def cut(extra: Extra, tokens: int, *, known: int) -> dict[str, Any]:
    """The values of a response that ends behind `tokens`, the prompt's included; those of the first ones are `known`."""
    return dict(extra) | {name: padded(values[:known], tokens) for name, values in of_tokens(extra).items()}


def of_episode(extra: Extra, prompt_tokens: int, sampled_mask: Sequence[int], versions: Sequence[int]) -> dict[str, Any]:
    """The values of a whole episode from those of its tokens up to its last turn."""
    whole = prompt_tokens + len(sampled_mask)
    episode_extra = dict(extra)
    for name, values in of_tokens(extra).items():
        rules = columns()[name].tokens
        assert rules is not None, "of_tokens"
        episode_extra[name] = rules.of_episode(padded(values, whole), prompt_tokens, sampled_mask, versions)
    return episode_extra


def to_json(extra: Extra) -> dict[str, Any]:
    """A JSON-able form by name; `from_json` reads it."""
    return {name: columns()[name].to_json(value) for name, value in extra.items()}


def from_json(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values in a JSON object, and its other fields."""
    known = columns()
    values = {name: known[name].from_json(value) for name, value in record.items() if name in known and value is not None}
    return values, {name: value for name, value in record.items() if name not in known}


def concatenated(name: str, pieces: Sequence[TokenValues]) -> TokenValues:
    """The values of the token column `name` of tokens that were computed one piece after another."""
    rules = columns()[name].tokens
    assert rules is not None, "only token columns come in pieces"
    return np.concatenate(rules.alike(pieces))


def unknown(dtype: npt.DTypeLike) -> float:
    """The number that stands in a token column of this type where nothing is known."""
    return int(np.iinfo(dtype).max) if np.issubdtype(dtype, np.integer) else np.nan


def padded(values: TokenValues, tokens: int) -> TokenValues:
    """Values of the first of `tokens`, behind which none are known."""
    rest = np.full((tokens - len(values), *values.shape[1:]), unknown(values.dtype), values.dtype)
    return np.concatenate([values, rest])


@dataclass(frozen=True, eq=False)
class Ragged:
    """Arrays that lie one behind the other in `values`; array i is `values[starts[i] : starts[i + 1]]`."""

    values: TokenValues
    starts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, arrays: Sequence[TokenValues], like: TokenValues) -> Ragged:
        """Lay `arrays`, which are as `like` but in their length."""
        starts = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate([like[:0], *arrays]), starts)

    def laid(self, numbers: Sequence[int], lengths: Sequence[int]) -> TokenValues:
        """The arrays `numbers` one behind the other, each padded to its length."""
        spans = zip(self.starts[[*numbers]].tolist(), self.starts[1:][[*numbers]].tolist(), lengths, strict=True)
        return np.concatenate([self.values[:0], *(padded(self.values[start:end], length) for start, end, length in spans)])


class TokenColumn:
    """A token column of a batch's rows: of its prompts, each once, and of its responses."""

    def __init__(
        self,
        name: str,
        of_rows: Sequence[TokenValues | None],
        prompt_of_row: Sequence[int],
        prompt_lengths: Sequence[int],
    ) -> None:
        """`of_rows`: of each row's prompt and response; None: not known. Responses to a prompt share what they agree on."""
        rules = columns()[name].tokens
        assert rules is not None, "only token columns are laid beside tokens"
        given = iter(rules.alike([values for values in of_rows if values is not None]))
        of_rows = [None if values is None else next(given) for values in of_rows]
        nobody = next(values for values in of_rows if values is not None)[:0]
        of_prompts: list[list[TokenValues]] = [[] for _ in prompt_lengths]
        responses: list[TokenValues] = []
        for values, prompt in zip(of_rows, prompt_of_row, strict=True):
            known, length = nobody if values is None else values, prompt_lengths[prompt]
            of_prompts[prompt].append(padded(known[:length], length))
            responses.append(known[length:])
        self.prompts = Ragged.of([rules.agreed(known) for known in of_prompts], nobody)
        self.responses = Ragged.of(responses, nobody)
