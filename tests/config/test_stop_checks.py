"""Stops that can end nothing, or end everything, are refused in one sentence that names the field and its place in the list."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.errors import ConfigError
from tests.config.smallest import config

SET = {"name": "one", "rows": {"source": "reasoning_gym", "name": "chain_sum"}}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"stop": ["a", ""]},
            r"rollout\.stop\[1\] is '', which would end every response at once; it must be a text of",
        ),
        (
            {"stop": ["a\ud800"]},
            r"rollout\.stop\[0\] is 'a\\ud800', which cannot be encoded: its character 1 is half of",
        ),
        (
            {"stop": ["\ufffd"]},
            r"rollout\.stop\[0\] is '\\ufffd', which has the character U\+FFFD, which stands for",
        ),
        ({"stop_token_ids": [3, -1]}, r"rollout\.stop_token_ids\[1\] is -1; it must be a token id, 0 or more"),
        (
            {"stop": ["a"], "ignore_eos": True},
            r"rollout\.stop needs responses that may end early: remove rollout\.ignore_eos",
        ),
        ({"stop_token_ids": [1], "ignore_eos": True}, r"rollout\.stop_token_ids needs responses that may end early"),
        ({"stop": "a"}, r"rollout\.stop"),
        ({"stop_token_ids": ["a"]}, r"rollout\.stop_token_ids"),
    ],
)
def test_a_stop_that_is_none_is_refused_by_name(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        config(rollout=given)
    assert "\n" not in str(refused.value)
    str(refused.value).encode()  # so that a terminal can show it


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"stop": [""]}, r"evaluations\[0\]\.stop\[0\] is '', which would end every response at once"),
        ({"stop_token_ids": [-5]}, r"evaluations\[0\]\.stop_token_ids\[0\] is -5"),
    ],
)
def test_so_is_one_of_an_evaluation_set(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(evaluations=[SET | given])
    with pytest.raises(ConfigError, match=r"evaluations\[0\]\.stop needs responses that may end early"):
        config(rollout={"ignore_eos": True}, evaluations=[SET | {"stop": ["a"]}])


def test_stops_of_a_config_are_read_and_those_of_a_set_are_its_own() -> None:
    sets = [SET, SET | {"name": "b", "stop": []}]
    read = config(rollout={"stop": ["</answer>", "\n"], "stop_token_ids": [7]}, evaluations=sets)
    assert (read.rollout.stop, read.rollout.stop_token_ids) == (("</answer>", "\n"), (7,))
    assert [(one.stop, one.stop_token_ids) for one in read.evaluations] == [(None, None), ((), None)]
