"""Choices, texts, JSON and forms are judged as their documents say; what cannot be judged is counted and gives 0."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards import RewardSources, build_rewards
from megarl.rewards.builtin.json_object import last_object

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))


def _rewards(name: str, **args: Any) -> RewardSources:
    return build_rewards([RewardConfig(name=name, args=args)], DATA)


def _sample(response: str, gold: Any) -> Sample:
    return Sample("s", "g", "train-0", [1], [], [], [], [], "stop", response_text=response, row={"answer": gold})


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        ("B", "The answer is B.", 1.0),
        ("(b)", "Answer: **B**", 1.0),
        ("B) forty", "\\boxed{\\text{B}}", 1.0),
        ("B", "<answer> b </answer>", 1.0),
        ("B", "First I thought the answer is A. But the answer is (B)", 1.0),
        ("B", "The answer is B. No: the answer is C", 0.0),
        ("C", "A) no\nB) no\n\nC", 1.0),
        ("A", "The answer is a train. A train leaves.", 0.0),
        ("A", "A train leaves", 0.0),
        ("A", "The answer is A train", 0.0),
        ("B", "Better", 0.0),
        ("B", "", 0.0),
    ],
)
def test_the_last_stated_choice_counts(gold: str, response: str, reward: float) -> None:
    rewards = _rewards("multiple_choice", choices="ABCD")
    assert rewards.score([_sample(response, gold)]) == [reward]
    assert rewards.failures == {}


@pytest.mark.parametrize(
    ("gold", "response", "exact", "fuzzy"),
    [
        ("Paris", "paris.", 1.0, 1.0),
        ("New  York", "I say <answer>new york</answer>", 1.0, 1.0),
        (["Paris", "City of Light"], "city of light", 1.0, 1.0),
        ("ﬁne", "fine", 1.0, 1.0),
        ("abcd", "abxd", 0.0, 0.75),
        ("ab", "xy", 0.0, 0.0),
        (12, "12", 1.0, 1.0),
    ],
)
def test_texts_are_compared_normalised(gold: Any, response: str, exact: float, fuzzy: float) -> None:
    assert _rewards("exact_text").score([_sample(response, gold)]) == [exact]
    assert _rewards("fuzzy_text").score([_sample(response, gold)]) == [fuzzy]
    assert _rewards("fuzzy_text", threshold=0.75).score([_sample(response, gold)]) == [float(fuzzy >= 0.75)]


def test_case_may_count() -> None:
    assert _rewards("exact_text", case_sensitive=True).score([_sample("paris", "Paris")]) == [0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('so {"a": 1} and {"b": {"c": 2}} done', {"b": {"c": 2}}),
        ('```json\n{"a": 1}\n``` or {"b": 2}', {"a": 1}),
        ('{"a": "} {"}', {"a": "} {"}),
        ('{"a": 1', None),
        ('{"a": NaN}', None),
        ("[1]", None),
        ('{"a": 1} {"a": 2e999}', {"a": 1}),
        ("{" * 100_000, None),
        ('{"a":' * 41_000, None),
        ('{"a":' * 64 + "1" + "}" * 64, json.loads('{"a":' * 64 + "1" + "}" * 64)),
        ('{"a":' * 65 + "1" + "}" * 65, None),
        ('{"a":' * 400 + "1" + "}" * 400, None),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, None),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", None),
        ('{"a":' * 1000 + '"' + "\\n" * 2_000_000, None),
    ],
    ids=range(15),
)
def test_last_object_is_found(text: str, value: Any) -> None:
    started = time.process_time()
    found = last_object(text)
    assert time.process_time() - started < 2
    assert found == value
    for more in ({"match_answer": True}, {"schema": {"type": "object"}}):
        assert _rewards("json_object", **more).score([_sample(text, {"a": 1})]) in ([0.0], [1.0])


def test_json_is_held_against_keys_schema_and_gold() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    responses = ['{"a": 1}', '{"a": "x"}', '{"b": 1}', "none"]
    samples = [_sample(response, '{"a": 1.0}') for response in responses]
    assert _rewards("json_object").score(samples) == [1.0, 1.0, 1.0, 0.0]
    assert _rewards("json_object", required=["a"]).score(samples) == [1.0, 1.0, 0.0, 0.0]
    assert _rewards("json_object", schema=schema).score(samples) == [1.0, 0.0, 1.0, 0.0]
    assert _rewards("json_object", match_answer=True).score(samples) == [1.0, 0.0, 0.0, 0.0]
    assert _rewards("json_object", match_answer=True).score([_sample('{"a": true}', {"a": 1})]) == [0.0]


def test_the_whole_response_must_match_and_backtracking_costs_its_time_only() -> None:
    rewards = _rewards("format_regex", pattern="(a+)+b", timeout_s=0.5)
    samples = [_sample("aab", None), _sample("aabc", None), _sample("a" * 60, None), _sample("ab", None)]
    assert rewards.score(samples, deadline_s=60) == [1.0, 0.0, 0.0, 1.0]
    assert rewards.failures == {"train-0": 1}


@pytest.mark.parametrize(
    ("name", "args", "gold"),
    [
        ("multiple_choice", {}, "forty"),
        ("multiple_choice", {"choices": "AB"}, "C"),
        ("exact_text", {}, " . "),
        ("exact_text", {}, None),
        ("fuzzy_text", {}, []),
        ("json_object", {"match_answer": True}, "[1]"),
    ],
)
def test_gold_that_cannot_be_read_is_counted_and_a_missing_one_is_named(name: str, args: dict[str, Any], gold: Any) -> None:
    rewards = _rewards(name, **args)
    assert rewards.score([_sample(str(gold), gold)]) == [0.0]
    assert rewards.failures == {"train-0": 1}
    with pytest.raises(RewardError, match=f"reward '{name}': row train-0 has no key 'answer'"):
        rewards.check([Prompt("train-0", "", [1], "q", {"anser": "x"})])


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("multiple_choice", {"choices": "A1"}, "must be letters"),
        ("fuzzy_text", {"threshold": 2}, "threshold is 2"),
        ("json_object", {"schema": {"type": "thing"}}, "schema is no JSON schema"),
        ("format_regex", {"pattern": "("}, "is no regular expression"),
        ("format_regex", {}, "does not take the arguments"),
        ("code_tests", {"memory_mb": 0}, "memory_mb is 0"),
    ],
)
def test_unusable_arguments_are_refused(name: str, args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        _rewards(name, **args)


@pytest.mark.parametrize(
    ("gold", "first", "letter"), [(0, 0, "A"), (3, 0, "D"), ("2", 0, "C"), ("2", 1, "B"), (4, 1, "D"), ("B", 1, "B")]
)
def test_a_gold_choice_may_be_a_number(gold: Any, first: int, letter: str) -> None:
    rewards = _rewards("multiple_choice", choices="ABCD", first_index=first)
    assert rewards.score([_sample(f"\\boxed{{{stated}}}", gold) for stated in "ABCD"]) == [
        float(stated == letter) for stated in "ABCD"
    ]
    assert rewards.failures == {}


@pytest.mark.parametrize(("gold", "first"), [(4, 0), (0, 1), (-1, 0), ("123", 0), (True, 0)])
def test_a_number_beyond_the_choices_cannot_be_judged(gold: Any, first: int) -> None:
    rewards = _rewards("multiple_choice", choices="ABCD", first_index=first)
    assert rewards.score([_sample("\\boxed{A}", gold)]) == [0.0]
    assert rewards.failures == {"train-0": 1}


def test_a_first_index_is_0_or_1() -> None:
    with pytest.raises(RewardError, match=r"reward 'multiple_choice': first_index is 2; it must be 0 or 1"):
        _rewards("multiple_choice", first_index=2)
