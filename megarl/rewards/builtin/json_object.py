"""`json_object`: 1 if the last JSON object of the response is what was asked for, else 0.

The object is the last fenced block that is one, or else the last `{...}` in the text. Schemas are checked in child processes:
their patterns are regular expressions over text that a model wrote.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import jsonschema

from megarl.data.final_answer import without_thoughts
from megarl.data.sample import Prompt, Sample
from megarl.rewards.sandbox.judge_pool import ChildPool
from megarl.rewards.scorer import Verdict, Verifier

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_STARTS_TRIED = 1000
"""Braces from the end at which an object is looked for."""
_READ = 2_000_000
"""Characters read at these braces together, so that a long response of open objects costs no quadratic time."""
_DEEPEST = 64
"""Levels of an object at most; a deeper one is none: comparing it could end the process."""


class JsonObject(Verifier):
    """Valid JSON alone, with required keys, valid under a JSON schema, equal to the row's gold object: whatever is asked."""

    name = "json_object"

    def __init__(
        self,
        answer_key: str,
        *,
        required: Sequence[str] = (),
        schema: dict[str, Any] | None = None,
        match_answer: bool = False,
        timeout_s: float = 5.0,
    ) -> None:
        """Args:
            answer_key: key of the gold answer in a row.
            required: keys that the object must have.
            schema: a JSON schema.
            match_answer: the object must equal the gold answer, an object or the JSON text of one.
            timeout_s: for one check of the schema; one that takes longer is not judged.

        Raises:
            RewardError: the schema is none.
        """
        super().__init__(answer_key)
        self.required, self.schema, self.match_answer = required, schema, match_answer
        if schema is not None:
            try:
                jsonschema.validators.validator_for(schema).check_schema(schema)
            except jsonschema.SchemaError as error:
                raise self.error(f"schema is no JSON schema: {error.message}") from None
        self._children = ChildPool("json_schema", timeout_s)

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Verdict]:
        """1.0 or 0.0, or None where the gold answer is no JSON object or the schema took too long."""
        verdicts: list[Verdict] = []
        objects = [last_object(without_thoughts(sample.response_text)) for sample in samples]
        for sample, value in zip(samples, objects, strict=True):
            right = value is not None and all(key in value for key in self.required)
            if not self.match_answer:
                verdicts.append(float(right))
                continue
            gold = _gold_object(self.gold(sample))
            verdicts.append(None if gold is None else float(right and _same(value, gold)))
        if self.schema is None:
            return verdicts
        places = [index for index, verdict in enumerate(verdicts) if verdict == 1]
        valid = self._children.judge([((self.schema,), json.dumps(objects[index])) for index in places], until)
        for index, verdict in zip(places, valid, strict=True):
            verdicts[index] = verdict
        return verdicts

    def check(self, prompt: Prompt) -> None:
        """Refuse a row without a gold answer if that is compared."""
        if self.match_answer:
            super().check(prompt)


def last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object in `text` that no later one contains; None if there is none.

    No JSON here are NaN, Infinity and numbers that are too large or too small for a double, all of which would be equal, keys
    that are there twice, and half characters. Nor is the value of a key an object of its own, if what it is in is torn.
    """
    for block in reversed(_FENCED.findall(text)):
        value = _parsed(block.strip())
        if isinstance(value, dict):
            return value
    best: dict[str, Any] | None = None
    best_end, end, left = -1, len(text), _READ
    for _ in range(_STARTS_TRIED):
        end = text.rfind("{", 0, end)
        if end < 0 or left <= 0:
            break
        try:
            value, stop = _DECODER.raw_decode(text, end)
        except json.JSONDecodeError as error:
            # of a string without an end, which is read to the end of the text, `pos` is where it begins
            left -= (len(text) if error.msg.startswith("Unterminated") else error.pos) - end
            continue
        except (ValueError, RecursionError):
            left -= len(text) - end
            continue
        left -= stop - end
        if stop >= best_end:  # an object further left that reaches as far contains the one found before
            is_whole = _is_shallow(value) and not _IN_ANOTHER.search(text, max(end - _BEFORE, 0), end)
            best, best_end = (value if is_whole else None), stop
    return best


_HALF = re.compile("[\ud800-\udfff]")
_IN_ANOTHER = re.compile(r'"\s*:\s*\[?\s*\Z')
_BEFORE = 100
"""Characters before an object in which the key is looked for whose value it is, or begins with it."""


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value) or (value == 0 and re.search("[1-9]", re.split("[eE]", number)[0])):
        raise ValueError(number)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One whose keys are there once: readers differ in which of two values counts."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key that is there twice")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)


def _parsed(text: str) -> Any:
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if _is_shallow(value) else None


def _is_shallow(value: Any) -> bool:
    """Return whether at most `_DEEPEST` objects and lists of `value` are in one another, and its texts are whole characters."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        texts = (text for part in level for text in (part if isinstance(part, dict) else [part]) if isinstance(text, str))
        if any(_HALF.search(text) for text in texts):
            return False
        outers = [outer for outer in level if isinstance(outer, dict | list)]
        if not outers:
            return True
        level = [inner for outer in outers for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return not level


def _gold_object(gold: Any) -> dict[str, Any] | None:
    value = _parsed(gold) if isinstance(gold, str) else gold
    return value if isinstance(value, dict) else None


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON: true is not 1, and 1 is 1.0."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)
