"""`fuzzy_text`: how alike the answer and the gold text are after both are normalised as for `exact_text`."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.sample import Sample
from megarl.rewards.builtin.exact_text import ExactText
from megarl.rewards.sandbox.judge_pool import ChildPool
from megarl.rewards.scorer import Verdict


class FuzzyText(ExactText):
    """Graded by difflib's ratio: twice the matching characters over all characters, between 0 and 1."""

    name = "fuzzy_text"

    def __init__(
        self, answer_key: str, *, threshold: float | None = None, case_sensitive: bool = False, timeout_s: float = 5.0
    ) -> None:
        """With a `threshold` the reward is 1 from that ratio on, else 0; without, it is the ratio itself.

        `timeout_s` is given to one comparison, which may be slow for long texts; one that takes longer is not judged.

        Raises:
            RewardError: the threshold is not above 0 and at most 1.
        """
        if threshold is not None and not 0 < threshold <= 1:
            raise self.error(f"threshold is {threshold}; it must be above 0 and at most 1")
        super().__init__(answer_key, case_sensitive=case_sensitive)
        self.threshold = threshold
        self._children = ChildPool("fuzzy_text", timeout_s)

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """The best ratio with any gold text, or None where there is none or comparing took too long."""
        ratios = self._children.judge([((self.gold_texts(sample),), self.answer(sample)) for sample in samples], until)
        if self.threshold is None:
            return ratios
        return [None if ratio is None else float(ratio >= self.threshold) for ratio in ratios]
