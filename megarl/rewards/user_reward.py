"""A reward function of the user: `f(samples, **args) -> list[float]`, or `f(sample, **args) -> float`, sync or async, or one
that was written for another trainer (`foreign_forms.py`).

Whatever it does wrong becomes a RewardError that names it and what it returned; `tolerance.py` says what a run does then.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError, RewardServerError
from megarl.rewards.foreign_forms import RowKeys, asks_apart, columns_missing, foreign_form, numbers_of
from megarl.rewards.scorer import Outcome
from megarl.system.user_code import describe, load_user_function, why_not_called

DEFAULT_KEYS = RowKeys()
SAMPLE_HAS = (
    "response_text, prompt_text, row (the data row: sample.row['answer']), turns, finish_reason, truncated and response_ids"
)
"""What functions read of a sample, as the error about another name says it; docs/add_a_reward.md has all of it."""


class UserReward:
    """The function called `name`. It scores one sample at a time if its first parameter is `sample` or `single` is true."""

    keeps_errors = False

    def __init__(self, name: str, args: Mapping[str, Any], keys: RowKeys = DEFAULT_KEYS) -> None:
        """Import the function and check that it takes `args` (without `single`). Functions of other trainers read `keys`.

        Raises:
            RewardError: it cannot be imported, or refuses the arguments.
        """
        self.name = name
        self.args = {key: value for key, value in args.items() if key != "single"}
        self.function = load_user_function(name, RewardError)
        self.single = bool(args["single"]) if "single" in args else _first_parameter(self.function) == "sample"
        self.keys, self.foreign = keys, foreign_form(self.function)
        self.judges_apart = asks_apart(self.foreign) if self.foreign is not None else self.single
        if self.foreign is None and (why := why_not_called(self.function, None, **self.args)) is not None:
            what = f"the arguments {self.args}" if self.args else "samples as its only argument"
            raise RewardError(f"reward function '{name}' does not take {what}: {why}")

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Outcome]:
        """One finite reward per sample; an error that is kept stands for the samples of its call."""
        try:
            answer = self._ask(samples)
        except (Exception, SystemExit) as error:
            raise self._raised(error, samples) from error
        if isinstance(answer, Exception):
            raise self._raised(answer, samples) from answer
        if hasattr(answer, "tolist"):  # NumPy arrays and tensors
            answer = answer.tolist()
        if not isinstance(answer, list | tuple):
            raise RewardError(
                f"reward function '{self.name}' returned {_show(answer)}; it must return a list of {len(samples)} numbers"
            )
        if len(answer) != len(samples):
            raise RewardError(f"reward function '{self.name}' returned {len(answer)} rewards for {len(samples)} samples")
        return [self._outcome(value, sample) for value, sample in zip(answer, samples, strict=True)]

    def check(self, prompt: Prompt) -> None:
        """Refuse a row without a column that a function of another trainer asks for by a parameter's name.

        What a function reads in `sample.row` is its own business.
        """
        missing = columns_missing(self.function, prompt.row, self.keys, self.args) if self.foreign is not None else []
        if missing:
            raise RewardError(
                f"reward function '{self.name}' asks for '{missing[0]}', but row {prompt.row_id} has no such key; it has "
                f"{', '.join(prompt.row)}; rename a column (columns), or give the parameter a default"
            )

    def _ask(self, samples: Sequence[Sample]) -> Any:
        """Call the function outside any event loop, so that it may have one of its own; what it awaits runs at once.

        An error that is kept takes the place of a call's answer.
        """
        function = _guarded(self.function) if self.keeps_errors else self.function
        if self.foreign is not None:
            answer = self.foreign(function, samples, self.keys, self.args)
            if isinstance(answer, list) and any(map(inspect.isawaitable, answer)):
                answer = asyncio.run(_gather(answer))
            return numbers_of(asyncio.run(_gather([answer]))[0] if inspect.isawaitable(answer) else answer)
        if not self.single:
            answer = function(list(samples), **self.args)
            return asyncio.run(_gather([answer]))[0] if inspect.isawaitable(answer) else answer
        answers = [self._of_one(function, sample) for sample in samples]
        return asyncio.run(_gather(answers)) if any(map(inspect.isawaitable, answers)) else answers

    def _raised(self, error: BaseException, samples: Sequence[Sample]) -> RewardError:
        asks_a_sample = isinstance(error, AttributeError) and isinstance(error.obj, Sample)
        has = f"; a Sample has {SAMPLE_HAS}" if asks_a_sample else _of_row(error, samples)
        kind = RewardServerError if isinstance(error, RewardServerError) else RewardError  # runs restart for a server
        return kind(f"reward function '{self.name}' raised {describe(error)}{has}")

    def _outcome(self, value: Any, sample: Sample) -> Outcome:
        try:
            if isinstance(value, Exception):
                raise self._raised(value, [sample]) from value
            return self._number(value, sample)
        except RewardError as error:
            if self.keeps_errors:
                return error
            raise

    def _of_one(self, function: Callable[..., Any], sample: Sample) -> Any:
        try:
            return function(sample, **self.args)
        except (Exception, SystemExit) as error:
            error.add_note(f"row {sample.row_id}")
            raise

    def _number(self, value: Any, sample: Sample) -> float:
        if hasattr(value, "item") and getattr(value, "shape", None) == ():  # NumPy scalars and 0-d tensors
            value = value.item()
        try:
            reward = float(value) if isinstance(value, numbers.Real) else math.nan
        except OverflowError:  # an int beyond the largest float
            reward = math.inf
        if not math.isfinite(reward):
            raise RewardError(
                f"reward function '{self.name}' returned {_show(value)} for sample {sample.sample_id}, but a reward must be a "
                "finite number"
            )
        return reward


async def _gather(answers: Sequence[Any]) -> list[Any]:
    """`answers`, and what those among them that can be awaited give, all at once."""

    async def settled(answer: Any) -> Any:
        return await answer if inspect.isawaitable(answer) else answer

    return list(await asyncio.gather(*map(settled, answers)))


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which returns its errors, also those of what it gives to be awaited."""

    async def awaited(answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            return _as_exception(error)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            answer = function(*args, **named)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
            return _as_exception(error)
        return awaited(answer) if inspect.isawaitable(answer) else answer

    return call


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    exited = RuntimeError(f"SystemExit: {error}")
    exited.__cause__ = error
    return exited


def _of_row(error: BaseException, samples: Sequence[Sample]) -> str:
    """The row at which a function failed, where it is known: the one that it judged, or one without the key it asked for."""
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    lacking = next((sample for sample in samples if isinstance(key, str) and key not in sample.row), None)
    if lacking is not None:
        return f"; row {lacking.row_id} has no key '{key}', it has {', '.join(lacking.row) or 'none'}"
    return f"; it judged a response to {error.__notes__[0]}" if getattr(error, "__notes__", None) else ""


def _first_parameter(function: Any) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except ValueError:
        return ""


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
