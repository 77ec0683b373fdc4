"""The form of every source of reward to `RewardSources`: a callable from samples to verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from megarl.data.rows import value_of
from megarl.data.sample import Prompt, Sample
from megarl.errors import DataError, RewardError

Verdict = float | None
"""A reward, or None where a verifier could not judge (its gold answer cannot be parsed, or it failed or took too long)."""


class Scorer(Protocol):
    """Scores samples in order; may be called from any thread, one call at a time."""

    def __call__(self, samples: Sequence[Sample], until: float) -> Sequence[Verdict]:
        """One verdict per sample. `until` is the `time.monotonic()` after which nobody waits for the answer."""
        ...

    def check(self, prompt: Prompt) -> None:
        """Raise a RewardError if the responses to `prompt` could not be scored, whatever they are."""
        ...


@runtime_checkable
class StatesAnswers(Protocol):
    """A scorer that reads a final answer out of a response, so that responses may vote."""

    def final_answer(self, response: str) -> str | None:
        """The answer in one spelling, or None where the response states none."""
        ...


def gold_answer(of: Sample | Prompt, answer_key: str, reward: str) -> Any:
    """The gold answer in the data row of a sample or a prompt.

    Raises:
        RewardError: the row has no such key.
    """
    try:
        return value_of(of.row, answer_key, "data.answer_key", f"row {of.row_id}")
    except DataError as error:
        raise RewardError(f"reward '{reward}': {error}") from None
