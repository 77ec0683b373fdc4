"""Rewards over HTTP are the server's numbers in the order of the samples, or an error that names the URL: never a filler."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from aiohttp import web

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards import RewardSources, build_rewards
from megarl.rewards.server import make_app, serve_reward
from tests.rewards.local_server import running

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))


def _samples(count: int) -> list[Sample]:
    row = {"answer": 3}
    return [
        Sample(f"s{i}", "g", f"train-{i}", [1], [], [], [], [], "stop", "{answer} Q ", f"it is {i}", row=row)
        for i in range(count)
    ]


def _client(url: str, **args: Any) -> RewardSources:
    return build_rewards([RewardConfig(name="http", args={"url": url, "backoff_s": 0.01, **args})], DATA)


def test_client_and_server_give_what_the_reward_gives_here() -> None:
    settings = [RewardConfig(name="exact_number", weight=2.5)]
    with running(make_app(build_rewards(settings, DATA))) as url:
        for path in ("/", "/get_reward"):
            assert _client(url + path, batch_size=2).score(_samples(7)) == build_rewards(settings, DATA).score(_samples(7))
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer) == {"status": "ok", "rewards": ["exact_number"]}


def _post(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_server_answers_the_protocol_and_refuses_other_requests_in_one_sentence() -> None:
    with running(make_app(build_rewards([RewardConfig(name="exact_number")], DATA))) as url:
        good = {"query": ["p 1", "p 2"], "prompts": ["p ", "p "], "labels": ["2", "x"]}
        assert _post(url, json.dumps(good).encode()) == (
            200,
            {"rewards": [0.0, 0.0], "scores": [0.0, 0.0], "extra_logs": {"failures": 1}},
        )
        for body, sentence in (
            (b"<html>", "no JSON"),
            (b"[]", "Expected `object`, got `array`"),
            (json.dumps({**good, "labels": [2, 3]}).encode(), "Expected `str`, got `int` - at `$.labels[0]`"),
            (json.dumps({**good, "labels": ["2"]}).encode(), r"must have the same length, not [2, 2, 1]"),
            (json.dumps({**good, "prompts": ["q", "p"]}).encode(), "query 0 does not start with its prompt"),
        ):
            status, answer = _post(url, body)
            assert (status, sentence in answer["error"]) == (400, True), answer


def _answering(answer: Any, seen: list[Any] | None = None) -> web.Application:
    """A server that answers every POST with what the function `answer` gives."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(await request.json())
        given = answer(request)
        return await given if asyncio.iscoroutine(given) else given

    app = web.Application()
    app.add_routes([web.post("/", handle), web.post("/v1/chat/completions", handle)])
    return app


def _reset(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _hang(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            lambda r: web.Response(status=500, text="out of memory"),
            r"answered status 500: 'out of memory' \(asked up to 2 times\)",
        ),
        (lambda r: web.Response(status=404, text="no such page"), "answered status 404: 'no such page'$"),
        (lambda r: web.Response(text="<html> hello"), "answered what is no JSON: '<html> hello'"),
        (lambda r: web.json_response([1.0, 2.0]), "has no list of 'rewards'"),
        (lambda r: web.json_response({"scores": [1.0, 2.0]}), "has no list of 'rewards'"),
        (lambda r: web.json_response({"rewards": [1.0]}), "answered 1 rewards for 2 samples"),
        (lambda r: web.json_response({"rewards": [1.0, None]}), "answered the reward 'None'"),
        (lambda r: web.json_response({"rewards": [1.0, "2"]}), "answered the reward '2'"),
        (lambda r: web.json_response({"rewards": [1.0, True]}), "answered the reward 'True'"),
        (lambda r: web.Response(text='{"rewards": [1.0, NaN]}'), "answered the reward 'nan'"),
        (_reset, r"cannot be asked: ServerDisconnectedError"),
        (_hang, r"did not answer within 0\.3 s \(asked up to 2 times\)"),
    ],
)
def test_every_failure_names_the_url_and_what_it_answered(answer: Any, sentence: str) -> None:
    with running(_answering(answer)) as url, pytest.raises(RewardError, match=f"reward 'http': {url} .*{sentence}"):
        _client(url, retries=1, timeout_s=0.3).score(_samples(2))


def test_a_refused_connection_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(RewardError, match=f"{url} cannot be asked: ClientConnectorError"):
            _client(url, retries=1).score(_samples(2))


def test_a_server_that_recovers_is_asked_again_and_its_rewards_keep_their_order() -> None:
    seen: list[Any] = []

    def answer(request: web.Request) -> web.Response:
        if len(seen) % 2:
            return web.Response(status=503)
        return web.json_response({"rewards": [float(query.split()[-1]) for query in seen[-1]["query"]]})

    with running(_answering(answer, seen)) as url:
        assert _client(url, batch_size=2, concurrency=1).score(_samples(5)) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(seen) == 6
    assert seen[0] == {
        "query": ["{answer} Q it is 0", "{answer} Q it is 1"],
        "prompts": ["{answer} Q "] * 2,
        "labels": ["3", "3"],
    }


def test_the_deadline_for_all_rewards_ends_the_tries() -> None:
    started = time.monotonic()
    with running(_answering(_hang)) as url, pytest.raises(RewardError, match="reward 'http'"):
        _client(url, retries=50, timeout_s=30).score(_samples(2), deadline_s=0.5)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"url": "here:80"}, "must start with http"),
        ({"url": "http://h", "batch_size": 0}, "batch_size is 0"),
        ({"url": "http://h", "timeout_s": 0}, "timeout_s is 0"),
        ({}, "does not take the arguments"),
    ],
)
def test_unusable_arguments_are_refused(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        build_rewards([RewardConfig(name="http", args=args)], DATA)


def test_labels_may_be_off() -> None:
    row_without_answer = Prompt("train-0", "", [1], "q", {})
    _client("http://h", labels=False).check([row_without_answer])
    with pytest.raises(RewardError, match="reward 'http': row train-0 has no key 'answer'"):
        _client("http://h").check([row_without_answer])


def _judge(url: str, **args: Any) -> RewardSources:
    settings = {"url": f"{url}/v1", "model": "judge", "backoff_s": 0.01, "retries": 1, "timeout_s": 5, **args}
    return build_rewards([RewardConfig(name="llm_judge", args=settings)], DATA)


def _completion(text: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


def test_judge_scores_are_moved_to_0_and_1_and_an_answer_without_one_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    texts = ["Score: 1. No, Score: 4", "no idea", "Score: 11", None, [{"type": "text", "text": "Score: 0"}, 3]]
    seen: list[Any] = []
    keys = []

    def answer(request: web.Request) -> web.Response:
        keys.append(request.headers["Authorization"])
        return _completion(texts[int(seen[-1]["messages"][0]["content"].split()[-1])])

    template = "{answer} | {prompt} | {response}"
    with running(_answering(answer, seen)) as url:
        rewards = _judge(url, template=template, max=8, concurrency=1, api_key_env="JUDGE_KEY")
        assert rewards.score(_samples(5)) == [0.5, 0.0, 0.0, 0.0, 0.0]
    assert rewards.failures == {"train-1": 1, "train-2": 1, "train-3": 1}
    assert keys == ["Bearer secret"] * 5
    # a prompt that holds `{answer}` is shown as it is
    assert seen[0]["messages"] == [{"role": "user", "content": "3 | {answer} Q  | it is 0"}]
    assert (seen[0]["model"], seen[0]["temperature"]) == ("judge", 0)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda r: web.Response(status=500, text="no GPU"), "answered status 500: 'no GPU'"),
        (lambda r: web.json_response({"choices": []}), "which is no chat completion"),
        (lambda r: _completion(7), "answered with content '7', which is no text"),
        (_reset, "cannot be asked"),
    ],
)
def test_an_endpoint_that_fails_is_an_error(answer: Any, sentence: str) -> None:
    with (
        running(_answering(answer)) as url,
        pytest.raises(RewardError, match=f"reward 'llm_judge': {url}/v1/chat/completions .*{sentence}"),
    ):
        _judge(url).score(_samples(2))


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"pattern": "("}, "is no regular expression"),
        ({"pattern": "Score"}, "has no group"),
        ({"min": 3, "max": 3}, "min must be below max"),
        ({"template": "{prompt}"}, r"has no \{response\}"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "api_key_env is 'NO_SUCH_VARIABLE', but this variable is not set"),
    ],
)
def test_unusable_judges_are_refused(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        _judge("http://h", **args)


def test_an_address_that_is_taken_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RewardError, match=f"the reward server cannot listen on 127.0.0.1:{port}: "):
            serve_reward([RewardConfig(name="exact_number")], DATA, "127.0.0.1", port)
