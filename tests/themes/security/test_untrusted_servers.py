"""Servers of others that megarl asks get what is theirs alone, and no answer of theirs costs more than it may."""

from __future__ import annotations

import asyncio
import gzip
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import EngineError, RewardError
from megarl.options.environments.openenv import OpenEnvError, OpenEnvironment
from megarl.options.environments.section import OpenEnvConfig
from megarl.options.lora.sglang_client import load_adapters
from megarl.rewards import RewardSources, build_rewards
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang import client
from megarl.rollout.engines.sglang.client import SglangClient
from megarl.rollout.engines.sglang.external import ExternalEngine, ExternalServer
from megarl.weights.checksums import EngineLayout
from megarl.weights.group_sender import check_alive
from megarl.weights.model_compatibility import ServedModel
from megarl.weights.sglang_senders import ServerEndpoint
from tests.rewards.local_server import running

DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
LAYOUT = EngineLayout(ServedModel({}, "float32"))
TOKEN = "a-token-that-nobody-else-may-see"
SAMPLES = [Sample("s", "g", "train-0", [1], [], [], [], [], "stop", "Q ", "it is 3", row={"answer": "the gold answer"})]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)


def serving(answer: Callable[[web.Request], Any]) -> Any:
    """A server that answers whatever it is asked so."""

    async def handle(request: web.Request) -> web.StreamResponse:
        given = answer(request)
        return await given if asyncio.iscoroutine(given) else given

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    return running(app)


def rewards(name: str, url: str, **args: Any) -> RewardSources:
    given = {"http": {"token_env": "JUDGE_TOKEN"}, "llm_judge": {"api_key_env": "JUDGE_TOKEN", "model": "judge"}}[name]
    return build_rewards([RewardConfig(name=name, args={"url": url, "retries": 0, **given, **args})], DATA)


def _open_env(url: str) -> None:
    async def scenario() -> None:
        environment = OpenEnvironment(OpenEnvConfig(url=url, token_env="JUDGE_TOKEN"))
        try:
            await environment.reset(Prompt("a", "b", [1], "q", {}))
        finally:
            await environment.close()

    asyncio.run(scenario())


ASKING: dict[str, Callable[[str], Any]] = {
    "http": lambda url: rewards("http", url).score(SAMPLES),
    "llm_judge": lambda url: rewards("llm_judge", url).score(SAMPLES),
    "server_of_others": lambda url: ExternalServer(url, TOKEN, 1.0).ask("server_info"),
    "requests_for_responses": lambda url: asyncio.run(SglangClient(ExternalServer(url, TOKEN, 1.0)).control("pause", {})),
    "adapters": lambda url: asyncio.run(load_adapters(SglangClient(ExternalServer(url, TOKEN, 1.0)), {})),
    "responses": lambda url: _generate(url),
    "whether_it_lives": lambda url: check_alive(ServerEndpoint(url, LAYOUT, TOKEN)),
    "openenv": _open_env,
}


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """Another server, and what it has been asked."""
    seen: list[str] = []

    def answer(request: web.Request) -> web.Response:
        seen.append(f"{request.method} {request.path} {request.headers.get('Authorization')}")
        return web.json_response({"rewards": [1.0], "choices": [{"message": {"content": "Score: 10"}}]})

    with serving(answer) as url:
        yield url, seen


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("who", ASKING)
def test_a_redirect_leads_neither_token_nor_samples_to_another_server(
    who: str, status: int, elsewhere: tuple[str, list[str]]
) -> None:
    """urllib took the token along; aiohttp took the samples along, and the other server's rewards were believed."""
    other, seen = elsewhere
    with (
        serving(lambda request: web.Response(status=status, headers={"Location": f"{other}/there"})) as url,
        pytest.raises((RewardError, EngineError, OpenEnvError), match=rf"status {status} and names|answered {status}|HTTP Error"
                      rf" {status}|not followed"),
    ):  # fmt: skip
        ASKING[who](url)
    assert seen == []


BOMB = gzip.compress(b" " * (1 << 30), 9)


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while request.transport is not None:
        await response.write(b" " * (1 << 20))
    return response


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda r: web.Response(body=BOMB, headers={"Content-Encoding": "gzip"}), "answered with more than 16 MiB"),
        (_endless, "answered with more than 16 MiB"),
        (lambda r: web.Response(body=b"[" * 1_000_000), "answered what is no JSON"),
        (lambda r: web.Response(body=b'{"rewards": [' + b"9" * 100_000 + b"]}"), "answered what is no JSON"),
        (lambda r: web.Response(body=b"{}", headers={"Content-Encoding": "gzip"}), "cannot be asked: ClientPayloadError"),
        (lambda r: web.Response(body=b"\xff\xfe{}\x00\x1b[2J"), r"answered what is no JSON: .*\\x1b"),
        (lambda r: web.Response(body=b'"\\ud800"'), r"\\ud800"),
    ],
    ids=["bomb", "endless", "deep", "long_number", "no_gzip", "no_text", "surrogate"],
)
def test_an_answer_costs_no_more_than_it_may_and_is_one_sentence(answer: Any, sentence: str) -> None:
    """A bomb of 1 MB filled 1 GB, and an endless answer whatever came within the time of a try."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("http", "llm_judge"):
        with serving(answer) as url, pytest.raises(RewardError, match=sentence) as raised:
            rewards(name, url).score(SAMPLES)
        assert str(raised.value).encode()  # it can be written
        assert "\x1b" not in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 400_000


JSON = {"Content-Type": "application/json"}


def _generate(url: str) -> None:
    asked = SglangClient(ExternalServer(url, TOKEN, 1.0))
    asyncio.run(asked.generate(EngineRequest([[1, 2]], SamplingParams(4), deadline_s=60), 1))


@pytest.mark.parametrize(
    ("ask", "answer", "sentence"),
    [
        ("requests_for_responses", lambda r: web.Response(body=BOMB, headers={"Content-Encoding": "gzip"}), "more than 16 MiB"),
        ("requests_for_responses", _endless, "more than 16 MiB"),
        ("requests_for_responses", lambda r: web.Response(body=b"[" * 1_000_000, headers=JSON), "what is no JSON"),
        ("requests_for_responses", lambda r: web.Response(body=b"9" * 100_000, headers=JSON), "what is no JSON"),
        ("requests_for_responses", lambda r: web.Response(body=b"{", content_type="application/json"), "what is no JSON"),
        ("requests_for_responses", lambda r: web.Response(status=500, body=b"x" * 2000), "500: x{1000}$"),
        ("adapters", lambda r: web.json_response([True]), r"something that is no JSON object: \[True\]"),
        ("responses", lambda r: web.json_response("yes"), "something that is no JSON object: yes"),
        ("responses", lambda r: web.json_response({"meta_info": 3}), "something that is no generation"),
        ("server_of_others", _endless, "more than 16 MiB"),
        ("server_of_others", lambda r: web.Response(body=b"[" * 1_000_000), "what is no JSON"),
    ],
)
def test_an_engine_of_others_is_read_no_further_than_it_may_answer(ask: str, answer: Any, sentence: str) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with serving(answer) as url, pytest.raises(EngineError, match=rf"{url}/\w+ answered (with )?{sentence}"):
        ASKING[ask](url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 400_000


def test_a_response_is_read_further_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.MAX_GENERATION_BYTES == 1 << 30
    monkeypatch.setattr(client, "MAX_GENERATION_BYTES", 32 << 20)
    for answer in (_endless, lambda r: web.Response(body=BOMB, headers={"Content-Encoding": "gzip"})):
        with serving(answer) as url, pytest.raises(EngineError, match="/generate answered with more than 32 MiB"):
            _generate(url)


def test_a_charset_that_nobody_knows_is_not_asked_for() -> None:
    kind = {"Content-Type": "application/json; charset=absurd"}
    with serving(lambda r: web.Response(body=b'{"rewards": [0.5]}', headers=kind)) as url:
        assert rewards("http", url).score(SAMPLES) == [0.5]
        assert ASKING["requests_for_responses"](url) == {"rewards": [0.5]}


@pytest.mark.parametrize("answer", [[], None, "text", {}, {"model_path": 3}])
def test_a_server_of_others_that_says_nothing_useful_is_one_sentence(answer: Any) -> None:
    trainer = ServedModel({}, "float32")
    names_none = pytest.raises(EngineError, match="server_info names no model_path")
    with serving(lambda r: web.json_response(answer)) as url, names_none:
        asyncio.run(ExternalEngine.at(url, None, trainer, 5.0))
