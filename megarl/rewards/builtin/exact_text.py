"""`exact_text`: 1 if the answer is the gold text after both are normalised, else 0.

The answer is the text of the last `<answer>...</answer>`, or else the whole response. Normalised: Unicode NFKC, case folded,
white space collapsed, and quotes and punctuation at both ends removed.
"""

from __future__ import annotations

import unicodedata
from itertools import groupby

from megarl.data.final_answer import extract_answer
from megarl.data.sample import Sample
from megarl.rewards.scorer import Verdict, Verifier

_AROUND = " \t\n.,;:!?\"'`*_“”‘’"


class ExactText(Verifier):
    """The verifier over rows whose gold answer is a text, or a list of texts of which any is right."""

    name = "exact_text"

    def __init__(self, answer_key: str, *, case_sensitive: bool = False) -> None:
        """`case_sensitive`: do not fold case."""
        super().__init__(answer_key)
        self.case_sensitive = case_sensitive

    def judge(self, sample: Sample) -> Verdict:
        """1.0 or 0.0, or None where the gold answer is empty."""
        golds = self.gold_texts(sample)
        return float(self.answer(sample) in golds) if golds else None

    def answer(self, sample: Sample) -> str:
        """The normalised answer of a response."""
        return normalised(extract_answer(sample.response_text), case_sensitive=self.case_sensitive)

    def gold_texts(self, sample: Sample) -> list[str]:
        """The normalised gold texts of a row that are not empty; a gold of null has none."""
        gold = self.gold(sample)
        texts = gold if isinstance(gold, list | tuple) else [gold]
        candidates = [normalised(str(text), case_sensitive=self.case_sensitive) for text in texts if text is not None]
        return [text for text in candidates if text]


def normalised(text: str, *, case_sensitive: bool) -> str:
    """`text` in the form that is compared."""
    text = " ".join(unicodedata.normalize("NFKC", _marks_in_order(text)).split()).strip(_AROUND)
    return text if case_sensitive else text.casefold()


def _marks_in_order(text: str) -> str:
    """`text` with its marks (accents) taken apart and in Unicode's order; `normalize` takes quadratic time to sort them."""
    if text.isascii():
        return text
    apart = "".join(unicodedata.normalize("NFKD", character) for character in text)
    runs = groupby(apart, key=lambda character: unicodedata.combining(character) > 0)
    return "".join("".join(sorted(run, key=unicodedata.combining) if are_marks else run) for are_marks, run in runs)
