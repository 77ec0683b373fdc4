"""`multiple_choice`: 1 if the last choice that the response states is the gold letter, else 0.

A choice is stated by `<answer>B</answer>`, `\\boxed{B}`, "answer is B", "option B", `(B)`, or a line with the letter alone.
A letter inside a sentence is no choice: "A train leaves" states nothing.
"""

from __future__ import annotations

import re
from typing import Any

from megarl.data.final_answer import extract_answer, without_thoughts
from megarl.data.sample import Sample
from megarl.rewards.scorer import Verdict, Verifier


class MultipleChoice(Verifier):
    """The verifier over rows whose gold answer is a letter, alone or as in `(B)`, `B.`, `B) text` or `<answer>B</answer>`.

    It may also be the number of a choice.
    """

    name = "multiple_choice"

    def __init__(self, answer_key: str, *, choices: str = "ABCDEFGHIJ", first_index: int = 0) -> None:
        """`choices`: the letters that may be stated; small ones in an answer count as their capitals.

        `first_index`: the number of the first choice where gold answers are numbers: 0 (MMLU) or 1.

        Raises:
            RewardError: `choices` is empty or has something else than letters, or `first_index` is neither 0 nor 1.
        """
        if first_index not in (0, 1):
            raise self.error(f"first_index is {first_index!r}; it must be 0 or 1")
        self._choices, self._first_index = choices.upper(), first_index
        if not choices.isalpha():
            raise self.error(f"choices is '{choices}'; it must be letters such as 'ABCD'")
        super().__init__(answer_key)
        letter = f"(?P<{{}}>[{choices.upper()}{choices.lower()}])"
        capital = f"(?P<{{}}>[{choices.upper()}])"
        marks = r"[\s*_$({\[]{0,8}"
        self._stated = re.compile(
            rf"<answer>{marks}{letter.format('tagged')}(?!\w)"
            rf"|\\boxed\{{{marks}(?:\\text\{{)?{marks}{letter.format('boxed')}(?!\w)"
            rf"|\b(?i:answer|choice|option)(?:\s+(?i:is|would\s+be|should\s+be))?\s{{0,8}}:?{marks}{capital.format('said')}"
            r"(?![\w'])(?!\s+[a-z])"
            rf"|(?<!\w)\({capital.format('bracketed')}\)"
            rf"|^[ \t*_]*{capital.format('alone')}[ \t*_]*(?:[.):][ \t*_]*)?$",
            re.MULTILINE,
        )
        self._gold = re.compile(rf"\(?{letter.format('gold')}(?:[).:].*)?", re.DOTALL)

    def final_answer(self, response: str) -> str | None:
        """The letter stated last, as a capital; None if none is stated."""
        stated = list(self._stated.finditer(without_thoughts(response)))
        return str(stated[-1][str(stated[-1].lastgroup)]).upper() if stated else None

    def judge(self, sample: Sample) -> Verdict:
        """1.0 or 0.0, or None where the gold answer is none of the choices."""
        gold = self._gold_letter(extract_answer(str(self.gold(sample))))
        return None if gold is None else float(self.final_answer(sample.response_text) == gold)

    def _gold_letter(self, gold: str) -> str | None:
        if re.fullmatch(r"[0-9]{1,2}", gold):
            number = int(gold) - self._first_index
            return self._choices[number] if 0 <= number < len(self._choices) else None
        match: Any = self._gold.fullmatch(gold)
        return None if match is None else str(match["gold"]).upper()
