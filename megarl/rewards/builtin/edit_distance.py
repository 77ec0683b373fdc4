"""`edit_distance`: 1 minus the edit distance of answer and gold text over the longer one's length (text in pictures)."""

from __future__ import annotations

from megarl.data.final_answer import extract_answer
from megarl.data.sample import Sample
from megarl.rewards.scorer import Verdict, Verifier


class EditDistance(Verifier):
    """Graded by Levenshtein's distance: characters put in, left out or changed. White space is collapsed first."""

    name = "edit_distance"

    def __init__(self, answer_key: str, *, case_sensitive: bool = True) -> None:
        """`case_sensitive`: do not fold case."""
        super().__init__(answer_key)
        self.case_sensitive = case_sensitive

    def judge(self, sample: Sample) -> Verdict:
        """From 0 to 1, the best of a list of gold texts; None where there is none that has characters."""
        gold = self.gold(sample)
        golds = gold if isinstance(gold, list | tuple) else [gold]
        texts = [self._normalised(str(text)) for text in golds if text is not None]
        answer = self._normalised(extract_answer(sample.response_text))
        alike = (1 - edit_distance(answer, text) / max(len(answer), len(text)) for text in texts if text)
        return max(alike, default=None)

    def _normalised(self, text: str) -> str:
        text = " ".join(text.split())
        return text if self.case_sensitive else text.casefold()


def edit_distance(left: str, right: str) -> int:
    """Levenshtein's distance, a column of the table at once in the bits of two integers.

    Myers, "A fast bit-vector algorithm for approximate string matching based on dynamic programming", 1999, in Hyyrö's form for
    whole texts, 2001. A bit stands for a row: `up` where it is one more than the row above it, `down` where it is one less.
    """
    if not left or not right:
        return len(left) + len(right)
    if len(left) > len(right):  # the bits of a long answer would take quadratic time to set
        left, right = right, left
    rows, last = (1 << len(left)) - 1, 1 << (len(left) - 1)
    places: dict[str, int] = {}
    for row, character in enumerate(left):
        places[character] = places.get(character, 0) | 1 << row
    up, down, distance = rows, 0, len(left)
    for character in right:
        equal = places.get(character, 0)
        diagonal = (((equal & up) + up) ^ up) | equal | down
        higher, lower = down | (rows & ~(diagonal | up)), up & diagonal
        distance += bool(higher & last) - bool(lower & last)
        higher, lower = (higher << 1 | 1) & rows, lower << 1 & rows
        up, down = lower | (rows & ~(diagonal | higher)), higher & diagonal
    return distance
