"""The server of the protocol in `http_reward.py`: rewards of a config for trainers elsewhere.

`POST /` and `POST /get_reward` score, `GET /health` says that the server lives.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

from aiohttp import web

from megarl.config.secrets import bearer
from megarl.config.sections import DataConfig, RewardConfig
from megarl.data.sample import Prompt, Sample
from megarl.errors import RewardError
from megarl.rewards.catalogue import build_rewards
from megarl.rewards.sources import RewardSources
from megarl.system.bearer_tokens import is_loopback, read_token
from megarl.system.socket_names import NOTHING, SocketName

MAX_REQUEST_BYTES = 256 << 20
TOKEN_VARIABLE = "MEGARL_REWARD_TOKEN"
_FIELDS = ("query", "prompts", "labels")


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
    where: dict[str, Any] = {"host": host, "port": port}
    try:
        if port == 0:
            where = {"sock": socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)}
            port = where["sock"].getsockname()[1]
        labels = ", ".join(label for label, _, _ in sources.sources)
        listening = f"listening on http://{f'[{host}]' if ':' in host else host}:{port}/get_reward ({labels}); Ctrl-C ends it"
        with closing(SocketName(port, "reward server", "the server's token" if token is not None else NOTHING)):
            web.run_app(app, **where, print=(lambda _: say(listening)) if say is not None else None)
        if say is not None:
            say("ended")
    except (OSError, OverflowError) as error:
        raise RewardError(f"the reward server cannot listen on {host}:{port}: {error}") from None


def make_app(
    sources: RewardSources, *, answer_key: str = "answer", deadline_s: float = 600.0, token: str | None = None
) -> web.Application:
    """The application. Labels become the `answer_key` of a row; requests are scored one after another.

    With `token`, whoever does not bring it as bearer gets status 401, whatever was asked.
    """
    one_at_a_time = threading.Lock()

    def score(samples: list[Sample]) -> tuple[list[float], int]:
        with one_at_a_time:
            before = sum(sources.failures.values())
            rewards = sources.score(samples, deadline_s)
            return rewards, sum(sources.failures.values()) - before

    async def answer(request: web.Request) -> web.Response:
        try:
            samples = read_samples(await request.json(), answer_key)
            sources.check([Prompt(s.row_id, s.group_id, [], s.prompt_text, s.row) for s in samples])
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": f"the body is no JSON: {error}"}, status=400)
        except RewardError as error:
            return web.json_response({"error": str(error)}, status=400)
        try:
            rewards, failures = await asyncio.to_thread(score, samples)
        except RewardError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.json_response({"rewards": rewards, "scores": rewards, "extra_logs": {"failures": failures}})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "rewards": [label for label, _, _ in sources.sources]})

    @web.middleware
    async def admitted(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        brought = request.headers.get("Authorization", "").encode(errors="replace")
        if token is not None and not secrets.compare_digest(brought, bearer(token)["Authorization"].encode()):
            return web.json_response({"error": "the token is missing or wrong"}, status=401)
        return await handler(request)

    app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[admitted])
    app.add_routes([web.post("/", answer), web.post("/get_reward", answer), web.get("/health", health)])
    return app


def read_samples(body: Any, answer_key: str) -> list[Sample]:
    """The samples of a request; a response is the query without the prompt that it starts with.

    Raises:
        RewardError: the request is not of the protocol.
    """
    if not isinstance(body, dict):
        raise RewardError(f"the body must be an object with lists {', '.join(_FIELDS)}, not {type(body).__name__}")
    for name in _FIELDS:
        if not isinstance(body.get(name), list) or not all(isinstance(text, str) for text in body[name]):
            raise RewardError(f"'{name}' must be a list of texts")
    lengths = [len(body[name]) for name in _FIELDS]
    if len(set(lengths)) != 1:
        raise RewardError(f"query, prompts and labels must have the same length, not {lengths}")
    samples = []
    for index, (query, prompt, label) in enumerate(zip(*(body[name] for name in _FIELDS), strict=True)):
        if not query.startswith(prompt):
            raise RewardError(f"query {index} does not start with its prompt")
        ids = (f"request-{index}", f"request-{index}", f"request-{index}")
        texts = {"prompt_text": prompt, "response_text": query.removeprefix(prompt)}
        samples.append(Sample(*ids, [], [], [], [], [], "stop", row={answer_key: label}, **texts))
    return samples
