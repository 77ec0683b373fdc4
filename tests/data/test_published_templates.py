"""A family's chat template stands in one place, whichever tests render it."""

from __future__ import annotations

import re

from tests.data.family_templates import FAMILIES
from tests.data.published_templates import PUBLISHED


def test_a_family_that_both_lists_have_is_one_text() -> None:
    names = {name.replace(" ", "-"): family.template for name, family in FAMILIES.items()}
    both = {"Qwen3", "Llama-3", "GLM-4.5", "DeepSeek-V3.1"}
    assert {name for name in both if PUBLISHED[name] is not names[name]} == set()
    alike = [name for name in PUBLISHED.keys() & names.keys() if squeezed(PUBLISHED[name]) == squeezed(names[name])]
    assert {*alike} <= both, "another family is written twice, or is the same in both: let one list take it from the other"


def squeezed(template: str) -> str:
    """The template without white space and backslashes, in which two copies of one text may differ."""
    return re.sub(r"[\s\\]", "", template)
