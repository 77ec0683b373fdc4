"""The server of the protocol in `http_reward.py`: rewards of a config for trainers elsewhere.

`POST /` and `POST /get_reward` score, `GET /health` says that the server lives.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from megarl.config.sections import DataConfig, RewardConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.catalogue import build_rewards
from megarl.rewards.sources import RewardSources
from megarl.system.bearer_tokens import is_loopback, read_token
from megarl.system.http_server import Admission, Server, application, json_answer, listen, read_json, server_config
from megarl.system.socket_names import NOTHING, SocketName

MAX_REQUEST_BYTES = 256 << 20
TOKEN_VARIABLE = "MEGARL_REWARD_TOKEN"
GRACE_S = 60
"""For requests that are being scored when the server is told to end."""


class RewardRequest(msgspec.Struct):
    """The body of a request: three lists of one length."""

    query: list[str]
    """Prompts with their responses."""
    prompts: list[str]
    labels: list[str]


def serve_reward(
    rewards: Sequence[RewardConfig],
    data: DataConfig,
    host: str,
    port: int,
    token_file: str | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve the rewards of a config until interrupted, to who brings the token in `token_file`, or in MEGARL_REWARD_TOKEN.

    `say` is told where it listens, once it does, and that it has ended.

    Raises:
        RewardError: a reward cannot be built, the address cannot be listened on, or others could reach it without a token.
    """
    token = read_token(token_file, "--token-file", TOKEN_VARIABLE, RewardError)
    if token is None and not is_loopback(host):
        raise RewardError(
            f"--host is {host}, which others can reach, so the server needs a token: give --token-file, or set {TOKEN_VARIABLE}"
        )
    serve(build_rewards(rewards, data), host, port, answer_key=data.answer_key, token=token, say=say)


def serve(
    sources: RewardSources,
    host: str,
    port: int,
    *,
    answer_key: str = "answer",
    deadline_s: float = 600.0,
    token: str | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve `sources` until interrupted. `deadline_s` is given to the scoring of one request. Raises as `serve_reward`.

    With `port` 0 it is a free one, which `say` is told.
    """
    app = make_app(sources, answer_key=answer_key, deadline_s=deadline_s, token=token)
    try:
        with closing(listen(host, port)) as listening:
            port = listening.getsockname()[1]
            with closing(SocketName(port, "reward server", "the server's token" if token is not None else NOTHING)):
                if say is not None:
                    labels = ", ".join(label for label, _, _ in sources.sources)
                    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/get_reward"
                    say(f"listening on {address} ({labels}); Ctrl-C ends it")
                Server(server_config(app, grace_s=GRACE_S)).run([listening])
        if say is not None:
            say("ended")
    except (OSError, OverflowError) as error:
        raise RewardError(f"the reward server cannot listen on {host}:{port}: {error}") from None


def make_app(
    sources: RewardSources, *, answer_key: str = "answer", deadline_s: float = 600.0, token: str | None = None
) -> Admission:
    """The application. Labels become the `answer_key` of a row; requests are scored one after another.

    With `token`, whoever does not bring it as bearer gets status 401, whatever was asked.
    """
    one_at_a_time = threading.Lock()

    def score(samples: list[Sample]) -> tuple[list[float], int]:
        with one_at_a_time:
            before = sum(sources.failures.values())
            rewards = sources.score(samples, deadline_s)
            return rewards, sum(sources.failures.values()) - before

    async def answer(request: Request) -> Response:
        asked = await read_json(request, RewardRequest, MAX_REQUEST_BYTES)
        try:
            samples = read_samples(asked, answer_key)
            sources.check([Prompt(s.row_id, s.group_id, [], s.prompt_text, s.row) for s in samples])
        except RewardError as error:
            return json_answer({"error": str(error)}, 400)
        try:
            rewards, failures = await asyncio.to_thread(score, samples)
        except RewardError as error:
            return json_answer({"error": str(error)}, 500)
        return json_answer({"rewards": rewards, "scores": rewards, "extra_logs": {"failures": failures}})

    async def health(request: Request) -> Response:
        return json_answer({"status": "ok", "rewards": [label for label, _, _ in sources.sources]})

    routes = [Route("/", answer, methods=["POST"]), Route("/get_reward", answer, methods=["POST"]), Route("/health", health)]
    return Admission(application(routes), token=token, is_open=token is None, most_bytes=MAX_REQUEST_BYTES)


def read_samples(asked: RewardRequest, answer_key: str) -> list[Sample]:
    """The samples of a request; a response is the query without the prompt that it starts with.

    Raises:
        RewardError: the request is not of the protocol.
    """
    lengths = [len(asked.query), len(asked.prompts), len(asked.labels)]
    if len(set(lengths)) != 1:
        raise RewardError(f"query, prompts and labels must have the same length, not {lengths}")
    samples = []
    for index, (query, prompt, label) in enumerate(zip(asked.query, asked.prompts, asked.labels, strict=True)):
        if not query.startswith(prompt):
            raise RewardError(f"query {index} does not start with its prompt")
        ids = (f"request-{index}", f"request-{index}", f"request-{index}")
        samples.append(Sample(*ids, [], [], [], [], [], "stop", prompt, query.removeprefix(prompt), row={answer_key: label}))
    return samples
