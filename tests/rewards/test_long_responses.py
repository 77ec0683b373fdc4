"""What reads a response in the scoring process takes time in proportion to its length, whatever a model wrote.

A pattern that looks at every pair of places takes minutes for a response of 200,000 characters, holds Python's lock meanwhile,
and so ends the run at the deadline for all rewards. A run of spaces is one token, so such a response costs a policy little.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.data.final_answer import extract_answer, last_boxed, read_boxes
from megarl.rewards.builtin.code_tests import extract_program
from megarl.rewards.builtin.edit_distance import edit_distance
from megarl.rewards.builtin.exact_number import last_number
from megarl.rewards.builtin.exact_text import normalised
from megarl.rewards.builtin.json_object import last_object
from megarl.rewards.builtin.multiple_choice import MultipleChoice
from megarl.rewards.sandbox.judges import says_number
from megarl.rollout.episodes.tool_calls import parse_turn

CHARACTERS = 100_000
CPU_S = 2.0
"""For one text; each takes less than 0.3 s, and took 3 s or more where a reader was quadratic."""
READERS: dict[str, Callable[[str], Any]] = {
    "code_tests": extract_program,
    "exact_number": last_number,
    "exact_text": lambda text: normalised(text, case_sensitive=False),
    "edit_distance": lambda text: edit_distance(text, "what is expected"),
    "multiple_choice": MultipleChoice("answer").final_answer,
    "json_object": last_object,
    "<answer>": extract_answer,
    "\\boxed": last_boxed,
    "boxes": read_boxes,
    "math_verify": lambda text: says_number(text, last_number("5")),  # type: ignore[arg-type]
    "tool calls": parse_turn,
}
BEGINNINGS = ("", "```", "A", "answer", "Answer: A", "\\boxed{", "<answer>", '{"a":' * 1000 + '"', "<tool_call>", "<function=")
REPEATED = (
    *(" ", "\n", "a", "1", ".", "1,", "111,", "(", "[", "{", "`", "```\n", "\n```", "<answer>", "\\boxed{", "\\text{", "**"),
    *("answer is ", "A ", '{"a":', '{"', "\\n", "[1,2,3,4]", "(1,1),", "<tool_call>", "<function=", "</function>", "<|start|>"),
    *("[TOOL_CALLS]", "<arg_key>", "\u0301\u0327", "\ufdfa", "ab"),
)


PLAIN = ("exact_text", "edit_distance")
"""Readers that look for nothing: no character changes what they do with those behind it."""


@pytest.mark.parametrize(
    ("reader", "beginnings"),
    [
        *((reader, BEGINNINGS[:2] if reader in PLAIN else BEGINNINGS) for reader in READERS),
        *(pytest.param(reader, BEGINNINGS[2:], marks=pytest.mark.exhaustive) for reader in PLAIN),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_a_long_response_costs_time_in_proportion_to_its_length(reader: str, beginnings: Sequence[str]) -> None:
    read = READERS[reader]
    for beginning in beginnings:
        for repeated in REPEATED:
            text = beginning + repeated * (CHARACTERS // len(repeated)) + "!"
            started = time.process_time()
            read(text)
            took_s = time.process_time() - started
            assert took_s < CPU_S, f"{reader} takes {took_s:.1f} s for {beginning[:20]!r} and {repeated!r} again and again"


def test_a_text_of_a_million_characters_is_compared_with_a_short_one_at_once() -> None:
    started = time.process_time()
    assert edit_distance("ab" * 500_000, "ba") == 999_998
    assert time.process_time() - started < CPU_S


@given(st.text(st.sampled_from("aA\u0301\u0327\u0344\u0323\ufb01\ud55c\u1100\u1161\ufdfa\u0345\U0001d15e\u0f71\u0f72\u0f74")))
@example("q" + "\u0307\u0323" * 40)
def test_marks_are_put_in_order_as_unicode_has_them(text: str) -> None:
    assert normalised(f"x{text}x", case_sensitive=True) == unicodedata.normalize("NFKC", f"x{text}x")
