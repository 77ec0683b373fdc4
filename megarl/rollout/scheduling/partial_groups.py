"""Turns that engines have answered to groups that are not finished, by turn, so that none of it is asked for again."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from megarl.data.columns import from_json, of_responses, to_json
from megarl.data.prefills import PrefillCounts
from megarl.data.sample import Sample
from megarl.rollout.engines.protocol import Generation
from megarl.rollout.engines.stored_turns import SampledTurn, loaded


class PartialGroup:
    """The turns that were sampled for a group: whole ones, and the beginnings of those that were cut.

    A turn is known by the number of its sample, by the tokens that it follows and by how often the sample asked for these
    before. So an episode that is run again from its beginning finds its turns as long as it is told the same.
    """

    def __init__(self) -> None:
        self._turns: dict[str, SampledTurn] = {}

    def turn(self, name: str) -> SampledTurn | None:
        """The kept part of a turn."""
        return self._turns.get(name)

    def keep(self, name: str, generation: SampledTurn) -> None:
        """Take over what there is of a turn by now."""
        if generation.tokens or generation.finish_reason != "abort":
            self._turns[name] = generation

    @property
    def tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(turn.tokens for turn in self._turns.values())

    def empty(self) -> int:
        """Forget all turns; returns how many tokens they had."""
        tokens = self.tokens
        self._turns = {}
        return tokens

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form, which `of_dict` reads."""
        record: dict[str, Any] = {}
        for name, turn in self._turns.items():
            turn = loaded(turn)
            plain = asdict(replace(turn, extra={}))
            del plain["extra"]
            # the tokens of a turn that was cut are computed anew
            extra = turn.extra if turn.finish_reason != "abort" else of_responses(turn.extra)
            record[name] = plain | to_json(extra)
        return record

    @classmethod
    def of_dict(cls, record: Mapping[str, Any]) -> PartialGroup:
        """Read what `to_dict` wrote."""
        group = cls()
        for name, turn in record.items():
            extra, plain = from_json(turn)
            group._turns[name] = Generation(**plain | {"prefill": PrefillCounts(**plain["prefill"]), "extra": extra})
        return group


def turn_name(number: int, ids: Sequence[int], times: int = 0) -> str:
    """The name of the turn of sample `number` that follows `ids`, which it asked for `times` times before."""
    return f"{number}/{_digest(ids)}/{times}"


def turn_names(n: int, ids: Sequence[int]) -> list[str]:
    """The names of the first turns of samples 0 to `n` - 1 that follow `ids`."""
    digest = _digest(ids)
    return [f"{number}/{digest}/0" for number in range(n)]


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:32]


class PartialGroups:
    """Partial groups of a scheduler by group number. If `continues` is false they are only counted, never resumed."""

    def __init__(self, *, continues: bool) -> None:
        self.continues = continues
        self.aborted_tokens = 0
        """Tokens that engines sampled and that were thrown away, as far as they said so."""
        self._groups: dict[int, PartialGroup] = {}

    def of(self, number: int) -> PartialGroup:
        """The kept part of a group."""
        return self._groups.setdefault(number, PartialGroup())

    def goes_on(self, number: int) -> bool:
        """Return whether there is something of a group that it can go on from."""
        return self.continues and number in self._groups and self._groups[number].tokens > 0

    def throw_away(self, number: int) -> None:
        """A group begins anew."""
        if number in self._groups:
            self.aborted_tokens += self._groups.pop(number).empty()

    def consume(self, number: int, samples: Sequence[Sample]) -> None:
        """The group was made into `samples`: what is in none of them was thrown away."""
        group = self._groups.pop(number, None)
        if group is not None:
            self.aborted_tokens += group.tokens - sum(sample.sampled_tokens for sample in samples)

    def state_dict(self, finished: Container[int]) -> dict[str, Any]:
        """The kept part of groups that are not `finished` and will go on, JSON-able."""
        return {str(n): group.to_dict() for n, group in self._groups.items() if n not in finished and self.goes_on(n)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[int]:
        """Continue from `state_dict()`'s answer; returns the groups that go on."""
        self._groups = {int(n): PartialGroup.of_dict(turns) for n, turns in state.items()} if self.continues else {}
        return list(self._groups)
