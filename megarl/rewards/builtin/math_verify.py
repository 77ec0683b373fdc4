"""`math_verify`: 1 if math-verify finds the response's final answer equal to the gold answer, else 0.

The final answer is in the text of the last `<answer>...</answer>`, or else in the whole response. So is the gold one.

Each answer is judged in a confined process of its own that ends when it takes too long, so no response can stop a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.final_answer import extract_answer, last_boxed, without_thoughts
from megarl.data.sample import Sample
from megarl.rewards.builtin.exact_number import last_number
from megarl.rewards.sandbox.judge_pool import ChildPool
from megarl.rewards.scorer import Verdict, Verifier


class MathVerify(Verifier):
    """The verifier over rows with a mathematical gold answer: a number, a formula, LaTeX, or text that contains one."""

    name = "math_verify"

    def __init__(self, answer_key: str, *, timeout_s: float = 5.0, allow_expressions: bool = False) -> None:
        """`timeout_s` is given to one answer; one that takes longer is not judged, which is counted like a failure.

        `allow_expressions`: where the gold answer is a number, take also what evaluates to it, such as `123 \\times 456` or
        `144/2`; a model that says the question again is then right.
        """
        super().__init__(answer_key)
        self.allow_expressions = allow_expressions
        self._children = ChildPool("math_verify", timeout_s)

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """1.0 or 0.0, or None where the gold answer cannot be parsed or judging took too long."""
        golds = [extract_answer(str(self.gold(sample))) for sample in samples]
        about = [(gold, self.allow_expressions) for gold in golds]
        answers = [extract_answer(sample.response_text) for sample in samples]
        return self._children.judge(list(zip(about, answers, strict=True)), until)

    def final_answer(self, response: str) -> str | None:
        """The last `\\boxed{...}`, else the last number, else the text in `<answer>`; None where there is none of them."""
        text = extract_answer(response)
        if (boxed := last_boxed(text)) is not None:
            return "".join(boxed.split())
        number = last_number(text)
        return str(number) if number is not None else (text if text != without_thoughts(response).strip() else None)
