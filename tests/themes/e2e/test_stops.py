"""Stops of a config and of a call on SGLang's real servers: greedy responses are those of the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import megarl
from megarl.config import Config
from megarl.data.sample import Sample

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]
TEXTS = ["Say a digit.", "1+1=", "Another one"]


@dataclass(frozen=True)
class Answers:
    """What an engine answered: without stops, with those of the config, with others, and in an episode's turns."""

    free: list[Sample]
    stopped: list[Sample]
    by_call: list[Sample]
    by_token: list[Sample]
    decode: Callable[[Sequence[int]], str]


def asked(config: Config, stop: Sequence[str] = (), token: int | None = None) -> Answers:
    """The greedy answers of the config's engine."""
    with megarl.open(config) as session:

        def greedy(**more: Any) -> list[Sample]:
            return [sample for [sample] in session.sample(TEXTS, greedy=True, **more)]

        def decode(ids: Sequence[int]) -> str:
            return str(session.inputs.tokenizer.decode(list(ids), skip_special_tokens=False))

        free = greedy(stop=[], stop_token_ids=[])
        last = [stop[-1]] if stop else []
        return Answers(free, greedy(), greedy(stop=last), greedy(stop=[], stop_token_ids=[token or 0]), decode)


def first(sample: Sample, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """The response up to the first token with which its text has one of `stops`."""
    ids = sample.response_ids
    lengths = (length for length in range(1, len(ids) + 1) if any(stop in decode(ids[:length]) for stop in stops))
    return ids[: next(lengths, len(ids))]


def said(text: str) -> str:
    """Three characters in the middle of a text, none of which stands for half a character."""
    return next(text[at : at + 3] for at in range(5, len(text) - 2) if "\ufffd" not in text[at : at + 3])


def test_greedy_responses_with_stops_are_those_of_the_embedded_engine(tiny_config: Callable[..., Config]) -> None:
    settings: dict[str, Any] = {"rollout.max_new_tokens": 24, "data.eval": None}
    before = asked(tiny_config(**settings))
    stops = [said(before.decode(sample.response_ids)) for sample in before.free[:2]]
    token = before.free[2].response_ids[7]
    ours, theirs = (
        asked(tiny_config(**settings | {"rollout.engine": engine, "rollout.stop": stops, "run.name": engine}), stops, token)
        for engine in ("embedded", "sglang")
    )
    assert [one.response_ids for one in ours.free] == [one.response_ids for one in theirs.free]
    for name, found in (("stopped", stops), ("by_call", stops[-1:])):
        for free, one, other in zip(ours.free, getattr(ours, name), getattr(theirs, name), strict=True):
            expected = first(free, found, ours.decode)
            assert one.response_ids == other.response_ids == expected
            assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=1e-4)
            has_stop = any(stop in ours.decode(expected) for stop in found)
            assert one.finish_reason == other.finish_reason == ("stop" if has_stop else free.finish_reason)
            assert one.response_text == other.response_text
    assert any(len(one.response_ids) < len(free.response_ids) for one, free in zip(ours.stopped, ours.free, strict=True))
    for free, one, other in zip(ours.free, ours.by_token, theirs.by_token, strict=True):
        until = free.response_ids.index(token) + 1 if token in free.response_ids else len(free.response_ids)
        assert one.response_ids == other.response_ids == free.response_ids[:until]
