"""The form of every source of reward to `RewardSources`: a callable from samples to verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from megarl.data.rows import value_of
from megarl.data.sample import Prompt, Sample
from megarl.errors import DataError, RewardError

Verdict = float | None
"""A reward, or None where a verifier could not judge (its gold answer cannot be parsed, or it failed or took too long)."""

Outcome = Verdict | Exception
"""A verdict, or the error of a scorer that `keeps_errors`."""


class Scorer(Protocol):
    """Scores samples in order; may be called from any thread, one call at a time."""

    keeps_errors: bool
    """Whether an error takes the place of the verdicts of those samples alone that it concerns, and the others are judged."""
    judges_apart: bool
    """Whether a sample's verdict does not depend on the others of its call, so that it may be judged before they are there."""

    def __call__(self, samples: Sequence[Sample], until: float) -> Sequence[Outcome]:
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


class Verifier:
    """A scorer that compares responses with the gold answers of their rows."""

    name: ClassVar[str]
    """What the config calls it."""
    keeps_errors, judges_apart = False, True

    def __init__(self, answer_key: str) -> None:
        """`answer_key`: key of the gold answer in a row."""
        self.answer_key = answer_key

    def __call__(self, samples: Sequence[Sample], until: float) -> Sequence[Outcome]:
        """The verdict of `judge` on each sample."""
        return [self._outcome(sample) for sample in samples]

    def _outcome(self, sample: Sample) -> Outcome:
        try:
            return self.judge(sample)
        except Exception as error:
            if self.keeps_errors:
                return error
            raise

    def judge(self, sample: Sample) -> Verdict:
        """The verdict on one sample, where a verifier judges them one by one."""
        raise NotImplementedError

    def check(self, prompt: Prompt) -> None:
        """Refuse a row without a gold answer."""
        self.gold(prompt)

    def gold(self, of: Sample | Prompt) -> Any:
        """The gold answer in the data row of a sample or a prompt.

        Raises:
            RewardError: the row has no such key.
        """
        try:
            return value_of(of.row, self.answer_key, "data.answer_key", f"row {of.row_id}")
        except DataError as error:
            raise self.error(str(error)) from None

    def error(self, sentence: str) -> RewardError:
        """The error that says `sentence` of this reward."""
        return RewardError(f"reward '{self.name}': {sentence}")
