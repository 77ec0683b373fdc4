"""`exact_text` and `fuzzy_text`: the answer compared with the gold text after both are normalised.

The answer is the text of the last `<answer>...</answer>`, or else the whole response. Normalised: Unicode NFKC, case folded,
white space collapsed, and quotes and punctuation at both ends removed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from megarl.config.schema import DataConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.child_pool import ChildPool
from megarl.rewards.reasoning_gym_task import extract_answer
from megarl.rewards.scorer import Verdict, gold_answer

_AROUND = " \t\n.,;:!?\"'`*_“”‘’"


class ExactText:
    """The verifier over rows whose gold answer is a text, or a list of texts of which any is right."""

    def __init__(self, data: DataConfig, *, case_sensitive: bool = False) -> None:
        """`case_sensitive`: do not fold case."""
        self.answer_key, self.case_sensitive = data.answer_key, case_sensitive

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """1.0 or 0.0, or None where the gold answer is empty."""
        return [self._judge(sample) for sample in samples]

    def check(self, prompt: Prompt) -> None:
        """Refuse a row without a gold answer."""
        gold_answer(prompt, self.answer_key, "exact_text")

    def _judge(self, sample: Sample) -> Verdict:
        golds = gold_texts(sample, self.answer_key, "exact_text", self.case_sensitive)
        answer = normalised(extract_answer(sample.response_text), self.case_sensitive)
        return float(answer in golds) if golds else None


class FuzzyText:
    """As `ExactText`, but graded by difflib's ratio: twice the matching characters over all characters, between 0 and 1."""

    def __init__(
        self, data: DataConfig, *, threshold: float | None = None, case_sensitive: bool = False, timeout_s: float = 5.0
    ) -> None:
        """With a `threshold` the reward is 1 from that ratio on, else 0; without, it is the ratio itself.

        `timeout_s` is given to one comparison, which may be slow for long texts; one that takes longer is not judged.

        Raises:
            RewardError: the threshold is not above 0 and at most 1.
        """
        if threshold is not None and not 0 < threshold <= 1:
            raise RewardError(f"reward 'fuzzy_text': threshold is {threshold}, but it must be above 0 and at most 1")
        self.answer_key, self.threshold, self.case_sensitive = data.answer_key, threshold, case_sensitive
        self._children = ChildPool("fuzzy_text", timeout_s)

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """The best ratio with any gold text, or None where there is none or comparing took too long."""
        ratios = self._children.judge([self._question(sample) for sample in samples], until)
        if self.threshold is None:
            return ratios
        return [None if ratio is None else float(ratio >= self.threshold) for ratio in ratios]

    def check(self, prompt: Prompt) -> None:
        """Refuse a row without a gold answer."""
        gold_answer(prompt, self.answer_key, "fuzzy_text")

    def _question(self, sample: Sample) -> tuple[list[str], str]:
        golds = gold_texts(sample, self.answer_key, "fuzzy_text", self.case_sensitive)
        return golds, normalised(extract_answer(sample.response_text), self.case_sensitive)


def normalised(text: str, case_sensitive: bool = False) -> str:
    """`text` in the form that is compared."""
    text = " ".join(unicodedata.normalize("NFKC", text).split()).strip(_AROUND)
    return text if case_sensitive else text.casefold()


def gold_texts(sample: Sample, answer_key: str, reward: str, case_sensitive: bool) -> list[str]:
    """The normalised gold texts of a row that are not empty; a gold of null has none."""
    gold = gold_answer(sample, answer_key, reward)
    texts = gold if isinstance(gold, list | tuple) else [gold]
    found = [normalised(str(text), case_sensitive) for text in texts if text is not None]
    return [text for text in found if text]
