"""Responses that are not the JSON object that was asked for, and must not be taken for it; and right ones in rare forms."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Sample
from megarl.rewards import RewardSources, build_rewards

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
GOLD = {"name": "Ann", "age": 42, "tags": ["a", "b"], "ok": True, "left": 0, "more": None}
RIGHT = json.dumps(GOLD)
OTHER = json.dumps({**GOLD, "age": 41})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "pattern": "^[A-Za-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"const": 1},
        "tags": {"type": "array", "uniqueItems": True, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = '{"name": "Ann", "age": 42}'


class Try(NamedTuple):
    """A response that is wrong where the answer is compared, or under the schema, and why it might be paid."""

    name: str
    response: str
    why: str
    is_compared: bool = True


TWICE = "readers differ in which of two values counts"
TORN = "an object inside something that is no JSON"
AS_TEXT = "JSON within a text is text"
NUMBERS = "numbers that a double makes equal"
KINDS = "values of other kinds that Python takes for equal"
LATER = "the last object counts"
UNSEEN = "characters that nobody sees, or that are half a character"
CHECK = "a schema is held against what it does not see"
TRIES = [
    Try("a key twice, the right value last", RIGHT.replace('"age"', '"age": 41, "age"'), TWICE),
    Try("a key twice, once in escapes", RIGHT.replace('"age"', '"\\u0061ge": 41, "age"'), TWICE),
    Try("all ages", "{" + "".join(f'"age": {age}, ' for age in range(42)) + RIGHT[1:], TWICE),
    Try("a key twice in a block", f"```json\n{RIGHT.replace('{', '{' + chr(34) + 'name' + chr(34) + ': 1, ')}\n```", TWICE),
    Try("a key twice further in", '{"name": "Ann", "age": 42, "tags": [{"x": 1, "x": 2}]}', TWICE, is_compared=False),
    Try("in an object without an end", f'{{"name": "Bob", "answer": {RIGHT}', TORN),
    Try("in an object with a comma too many", f'{{"name": "Bob", "answer": {RIGHT},}}', TORN),
    Try("in an object with NaN", f'{{"name": NaN, "answer": {RIGHT}}}', TORN),
    Try("in an object in single quotes", f"{{'name': 'Bob', \"answer\" : {RIGHT}}}", TORN),
    Try("in a list of an object without an end", f'{{"name": "Bob", "answers": [{RIGHT}', TORN),
    Try("in an object that is too deep", '{"a":' * 65 + RIGHT + "}" * 65, TORN),
    Try("in an object with a number too large", f'{{"age": 1e999, "answer":\n{RIGHT}}}', TORN),
    Try("in a block that is torn", f'```json\n{{"name": "Bob", "answer": {RIGHT}\n```', TORN),
    Try("in an object with comments", f'{{/* so */ "answer": {RIGHT} /* not */}}', TORN),
    Try("under a schema in an object without an end", f'{{"old": {PERSON}', TORN, is_compared=False),
    Try("as a text", json.dumps({"answer": RIGHT}), AS_TEXT),
    Try("as a text in a list", json.dumps([RIGHT]), AS_TEXT),
    Try("as a key", json.dumps({RIGHT: 1}), AS_TEXT),
    Try("a list around it, and another", f"[{RIGHT}, {OTHER}]", LATER),
    Try("another one behind it", f"{RIGHT} no, {OTHER}", LATER),
    Try("an empty object behind it", f"{RIGHT} {{}}", LATER),
    Try("an empty block behind it", f"```json\n{RIGHT}\n```\n```json\n{{}}\n```", LATER),
    Try("all ages in objects", "\n".join(json.dumps({**GOLD, "age": age}) for age in range(100)), LATER),
    Try("in thoughts that end", f"<think>{RIGHT}</think> I do not know", LATER),
    Try("in thoughts, and the other behind them", f"<think>{RIGHT}</think>{OTHER}", LATER),
    Try("one more key", RIGHT.replace("{", '{"extra": 1, ', 1), LATER),
    Try("a key less", RIGHT.replace(', "more": null', ""), LATER),
    Try("a list in another order", RIGHT.replace('"a", "b"', '"b", "a"'), KINDS),
    Try("too small for a double", RIGHT.replace('"left": 0', '"left": 1e-400'), NUMBERS),
    Try("too small in many digits", RIGHT.replace('"left": 0', f'"left": 0.{"0" * 400}7'), NUMBERS),
    Try("too large for a double", RIGHT.replace("42", "1e400"), NUMBERS),
    Try("too many digits", RIGHT.replace("42", "9" * 5000), NUMBERS),
    Try("one for true", RIGHT.replace("true", "1"), KINDS),
    Try("false for zero", RIGHT.replace('"left": 0', '"left": false'), KINDS),
    Try("a text for a number", RIGHT.replace("42", '"42"'), KINDS),
    Try("an empty list for null", RIGHT.replace("null", "[]"), KINDS),
    Try("a letter without width in a key", RIGHT.replace("age", "ag\u200be"), UNSEEN),
    Try("another alphabet in a key", RIGHT.replace("age", "\u0430ge"), UNSEEN),
    Try("half a character", '{"name": "Ann", "age": 42, "tags": ["\\ud800"]}', UNSEEN, is_compared=False),
    Try("half a character in a key", '{"name": "Ann", "age": 42, "tags": [{"\\udfff": 1}]}', UNSEEN, is_compared=False),
    Try("a zero byte in a key", RIGHT.replace("age", "age\\u0000"), UNSEEN),
    Try("true for a constant", '{"name": "Ann", "age": 42, "kind": true}', CHECK, is_compared=False),
    Try("an age that is not whole", '{"name": "Ann", "age": 41.5}', CHECK, is_compared=False),
    Try("true for an age", '{"name": "Ann", "age": true}', CHECK, is_compared=False),
    Try("a pattern's end before a new line", '{"name": "Ann\\n<b>", "age": 42}', CHECK, is_compared=False),
    Try("the same item twice as numbers", '{"name": "Ann", "age": 42, "tags": [1, 1.0]}', CHECK, is_compared=False),
    Try("the schema said again", json.dumps(SCHEMA), CHECK, is_compared=False),
    Try("a reference to the schema", '{"$ref": "#", "name": "Ann", "age": 42}', CHECK, is_compared=False),
]
HONEST = [
    RIGHT,
    f"```json\n{RIGHT}\n```",
    f"```\n{json.dumps(GOLD, indent=4)}\n```\nThat is all.",
    f"It is {{as asked}}: {RIGHT} {{end}}",
    f'The "answer" is {RIGHT}.',
    f"<answer>{RIGHT}</answer>",
    f"<think>{OTHER}, or {{</think>\n{RIGHT}",
    RIGHT.replace("42", "4.2e1"),
    RIGHT.replace("42", "42.0"),
    RIGHT.replace('"left": 0', '"left": -0.0'),
    RIGHT.replace('"left": 0', '"left": 0e-999'),
    RIGHT.replace("Ann", "\\u0041nn"),
    json.dumps(dict(reversed(GOLD.items()))),
    f"First {OTHER}; then, corrected, {RIGHT}",
    f"[{OTHER}, {RIGHT}]",
]


def _rewards(**args: Any) -> RewardSources:
    return build_rewards([RewardConfig(name="json_object", args=args)], DATA)


@pytest.fixture(scope="module")
def compared() -> RewardSources:
    return _rewards(match_answer=True)


@pytest.fixture(scope="module")
def checked() -> RewardSources:
    return _rewards(schema=SCHEMA, timeout_s=60)


def _sample(response: str) -> Sample:
    return Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text=response, row={"answer": GOLD})


@pytest.mark.parametrize("tried", TRIES, ids=[tried.name for tried in TRIES])
def test_what_is_not_the_object_is_not_paid(tried: Try, compared: RewardSources, checked: RewardSources) -> None:
    rewards = compared if tried.is_compared else checked
    assert rewards.score([_sample(tried.response)]) == [0.0], tried.why
    assert not rewards.failures


@pytest.mark.parametrize("response", HONEST, ids=range(len(HONEST)))
def test_the_object_is_found_in_forms_that_are_rare(response: str, compared: RewardSources) -> None:
    assert compared.score([_sample(response)]) == [1.0]


def test_what_the_schema_allows_is_paid(checked: RewardSources) -> None:
    allowed = [PERSON, '{"age": 42.0, "name": "Ann", "kind": 1, "tags": ["x", "\\ud83d\\ude00", 1]}']
    assert checked.score([_sample(response) for response in allowed]) == [1.0, 1.0]
