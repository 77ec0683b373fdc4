"""An engine's server answers nobody else: it listens on loopback, wants its token, and the token is nowhere to be read."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest

from megarl.rollout.engines.sglang.engine import SglangEngine

QUESTIONS = {
    "generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}},
    "update_weights_from_disk": {"model_path": "/tmp"},
    "update_weights_from_tensor": {"serialized_named_tensors": [], "load_format": None},
    "pause_generation": {"mode": "abort"},
    "server_info": None,
}


def processes(engine: SglangEngine) -> list[psutil.Process]:
    root = psutil.Process(engine.server.pid)
    return [root, *root.children(recursive=True)]


@pytest.mark.parametrize("what", QUESTIONS)
@pytest.mark.parametrize("token", [None, "guessed"])
def test_without_the_token_nothing_is_answered(sglang_engine: SglangEngine, what: str, token: str | None) -> None:
    body = QUESTIONS[what]
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = json.dumps(body).encode() if body is not None else None
    question = urllib.request.Request(f"{sglang_engine.server.url}/{what}", data=data, headers=headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(question, timeout=20)
    assert caught.value.code == 401
    caught.value.close()


def test_with_the_token_it_answers(sglang_engine: SglangEngine) -> None:
    answer = asyncio.run(sglang_engine._client.control("generate", dict(QUESTIONS["generate"] or {})))
    assert len(answer["output_ids"]) == 1


def test_it_listens_on_loopback(sglang_engine: SglangEngine) -> None:
    listening = [c for p in processes(sglang_engine) for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    own_port = urllib.parse.urlsplit(sglang_engine.server.url).port
    assert {c.laddr.ip for c in listening if c.laddr.port == own_port} == {"127.0.0.1"}
    # torch's rendezvous of the server's ranks listens everywhere, whatever it is told (docs/security.md)
    elsewhere = {c.laddr.port for c in listening if c.laddr.ip not in ("127.0.0.1", "::1")}
    assert len(elsewhere) <= 1, listening


def test_the_token_is_in_no_arguments_environment_or_log(sglang_engine: SglangEngine) -> None:
    token = sglang_engine.server.token
    assert len(token) >= 32
    for process in processes(sglang_engine):
        assert token not in " ".join(process.cmdline())
        assert token not in " ".join(process.environ().values())
    assert token not in Path(sglang_engine.server.options.log_file).read_text(errors="replace")
    assert token not in repr(sglang_engine.endpoint)
