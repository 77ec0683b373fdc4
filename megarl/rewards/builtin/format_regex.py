"""`format_regex`: 1 if the whole response matches a regular expression, else 0.

It is matched in child processes, as one expression and one response can take longer than a run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.sandbox.judge_pool import ChildPool
from megarl.rewards.scorer import Verdict


class FormatRegex:
    """The verifier of a form; it needs no gold answer."""

    keeps_errors, judges_apart = False, True

    def __init__(self, answer_key: str, *, pattern: str, timeout_s: float = 2.0) -> None:
        """`pattern` in Python's syntax (`(?s)` in front lets `.` match line ends); `timeout_s` is given to one response.

        Raises:
            RewardError: the pattern is no regular expression.
        """
        try:
            re.compile(pattern)
        except re.error as error:
            raise RewardError(f"reward 'format_regex': pattern '{pattern}' is no regular expression: {error}") from None
        self.pattern = pattern
        self._children = ChildPool("format_regex", timeout_s)

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """1.0 or 0.0, or None where matching took too long."""
        return self._children.judge([((self.pattern,), sample.response_text) for sample in samples], until)

    def check(self, prompt: Prompt) -> None:
        """Every row will do."""
