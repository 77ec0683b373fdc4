"""Responses whose tokens stay where they were sampled: a run's driver keeps their lengths, text and a handle to the rest.

A handle gives what it stands for to whoever asks (`Stored.get`). Processes that compute are handed the values themselves
(`data/stored_shares.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megarl.data.columns import Extra, of_responses
from megarl.data.prefills import NO_PREFILLS, PrefillCounts
from megarl.data.prefix_tree import NOTHING_SHARED, CommonPrefixes, common_prefixes
from megarl.data.sample import Prompt, Sample


class Stored(Protocol):
    """A handle to a value in a store."""

    def get(self) -> Any:
        """The value; fetched if it is elsewhere.

        Raises:
            WorkerError: it is gone with the machine that held it.
        """
        ...


@dataclass(frozen=True, eq=False)
class Held:
    """A handle to a value of this process."""

    value: Any

    def get(self) -> Any:
        """The value."""
        return self.value


@dataclass(frozen=True, eq=False)
class ResponseTokens:
    """Token columns of R responses to P prompts, one behind the other: response r is at `starts[r]` to `starts[r + 1]`.

    `starts` int64 `[R + 1]`, `token_ids` int32 `[L]`, `log_probs` float32 `[L]` in nats, `versions` int32 `[L]` of the
    weights. `prompt_starts` int64 `[P + 1]` and `prompt_ids` int32 are the prompts', likewise; response r answers the prompt
    `prompt_of[r]`, int64 `[R]`.
    """

    starts: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    prompt_starts: npt.NDArray[np.int64]
    prompt_ids: npt.NDArray[np.int32]
    prompt_of: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        prompt_of: Sequence[int],
        ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        versions: Sequence[Sequence[int]],
    ) -> ResponseTokens:
        """Lay the columns of responses, which are as long as each other, and the ids of `prompts`."""
        starts, prompt_starts = (np.cumsum([0, *map(len, rows)], dtype=np.int64) for rows in (ids, prompts))
        total = int(starts[-1])
        return cls(
            starts,
            np.fromiter(chain.from_iterable(ids), np.int32, total),
            np.fromiter(chain.from_iterable(log_probs), np.float32, total),
            np.fromiter(chain.from_iterable(versions), np.int32, total),
            prompt_starts,
            np.fromiter(chain.from_iterable(prompts), np.int32, int(prompt_starts[-1])),
            np.array(prompt_of, np.int64),
        )

    def place(self, response: int) -> slice:
        """The places of a response."""
        return slice(*self.starts[response : response + 2].tolist())

    def prompt(self, response: int) -> npt.NDArray[np.int32]:
        """The ids of the prompt that a response answers."""
        number = int(self.prompt_of[response])
        return self.prompt_ids[slice(*self.prompt_starts[number : number + 2].tolist())]


@dataclass(frozen=True, eq=False)
class StoredGeneration:
    """A `Generation` whose tokens are response `place` of a stored `ResponseTokens`, its text at this place of a stored list.

    `tokens`: its length. `versions`: of the weights, each with the number of tokens that it sampled, in order. `extra` are
    values of whole responses. `common` says what the responses of its answer's prompt begin with alike, if there are more
    than one, and `member` which of them it is.
    """

    stored: Stored
    texts: Stored
    place: int
    tokens: int
    versions: tuple[tuple[int, int], ...]
    finish_reason: Literal["stop", "length", "abort"]
    extra: Extra
    prefill: PrefillCounts = NO_PREFILLS
    common: CommonPrefixes = NOTHING_SHARED
    member: int = 0


def version_runs(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Versions one by one → each with the number of tokens in a row that have it."""
    return tuple((version, len([*run])) for version, run in groupby(versions))


def common_beginnings(ids: Sequence[Sequence[int]]) -> CommonPrefixes:
    """The common beginnings of a prompt's responses, never with the last token of one."""
    prefixes = common_prefixes([np.array(tokens[:-1], np.int32) for tokens in ids])
    return prefixes if any(prefixes.common) else NOTHING_SHARED


class RowSample(NamedTuple):
    """A sample as processes know it that compute on rows of a step, beside its tokens."""

    sample_id: str
    group_id: str
    truncated: bool
    versions: tuple[tuple[int, int], ...]


class StoredSample(Sample):
    """A single turn that answers `prompt`, its tokens in a store.

    `response_ids`, the other columns and the text are fetched when they are read. What a step decides by is here: lengths,
    versions, rewards. Copies with other fields (`dataclasses.replace`), and what other processes are sent, are `Sample`s with
    their tokens.
    """

    def __new__(cls, *made_of: Any, **named: Any) -> Any:
        """`named` are fields of a `Sample`, which is made then."""
        return Sample(**named) if named else super().__new__(cls)

    def __init__(self, prompt: Prompt, number: int, generation: StoredGeneration) -> None:
        """Make sample `number` of the group that `prompt` names."""
        self.prompt, self.generation = prompt, generation
        self.group_id = prompt.group_id or prompt.row_id
        self.sample_id, self.row_id = f"{self.group_id}/{number}", prompt.row_id
        self.finish_reason = generation.finish_reason
        self.rewards, self.row, self.media = {}, prompt.row, list(prompt.media)
        self.turns, self.turn_rewards, self.turn_states, self.labels = [], [], [], []
        self.branch_of, self.extra, self.prefill = "", of_responses(generation.extra), generation.prefill

    @cached_property
    def _columns(self) -> tuple[list[int], list[float], list[int]]:
        tokens: ResponseTokens = self.generation.stored.get()
        place = tokens.place(self.generation.place)
        return tokens.token_ids[place].tolist(), tokens.log_probs[place].tolist(), tokens.versions[place].tolist()

    @property
    def prompt_ids(self) -> list[int]:  # type: ignore[override]
        """The prompt's."""
        return self.prompt.prompt_ids

    @property
    def prompt_text(self) -> str:  # type: ignore[override]
        """The prompt's."""
        return self.prompt.prompt_text

    @cached_property
    def response_text(self) -> str:  # type: ignore[override]
        """Fetched."""
        return str(self.generation.texts.get()[self.generation.place])

    @property
    def response_ids(self) -> list[int]:  # type: ignore[override]
        """Fetched."""
        return self._columns[0]

    @property
    def sampled_mask(self) -> list[int]:  # type: ignore[override]
        """1 everywhere: the policy sampled all of a single turn."""
        return [1] * self.generation.tokens

    @property
    def rollout_log_probs(self) -> list[float]:  # type: ignore[override]
        """Fetched."""
        return self._columns[1]

    @property
    def weight_versions(self) -> list[int]:  # type: ignore[override]
        """Fetched."""
        return self._columns[2]

    @property
    def response_length(self) -> int:
        """Known without the tokens."""
        return self.generation.tokens

    @property
    def sampled_tokens(self) -> int:
        """All of the response's."""
        return self.generation.tokens

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Known without the tokens."""
        return self.generation.versions

    @property
    def has_rollout(self) -> bool:
        """An engine sampled it."""
        return True

    def __reduce__(self) -> Any:
        return Sample, tuple(getattr(self.loaded(), entry.name) for entry in fields(Sample))

    def loaded(self) -> Sample:
        """The same sample with its tokens."""
        names = ("sample_id", "group_id", "row_id", "prompt_ids", "response_ids", "sampled_mask", "rollout_log_probs",
                 "weight_versions", "finish_reason", "prompt_text", "response_text", "rewards", "row", "media", "extra",
                 "prefill")  # fmt: skip
        return Sample(**{name: getattr(self, name) for name in names})

    def for_work(self) -> RowSample:
        """The sample for processes that compute on its row."""
        return RowSample(self.sample_id, self.group_id, self.truncated, self.versions)

    def __repr__(self) -> str:
        return f"StoredSample({self.sample_id!r}, tokens={self.generation.tokens}, finish_reason={self.finish_reason!r})"
