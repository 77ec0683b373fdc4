"""The reward server is for who brings its token, and reachable for others only with one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.config.sections import DataConfig, RewardConfig
from megarl.config.sources import SourceConfig
from megarl.data.sample import Sample
from megarl.errors import RewardError
from megarl.rewards import build_rewards
from megarl.rewards.server import TOKEN_VARIABLE, make_app, serve_reward
from megarl.system.bearer_tokens import read_token
from tests.rewards.local_server import running

TOKEN = "0123456789abcdef-token"
DATA = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"))
EXACT = [RewardConfig(name="exact_number")]


def ask(url: str, header: str | None) -> int:
    body = json.dumps({"query": ["p 1"], "prompts": ["p "], "labels": ["1"]}).encode()
    request = urllib.request.Request(url, body, {"Authorization": header} if header is not None else {})
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_who_brings_the_token_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    sample = Sample("s", "g", "r", [1], [], [], [], [], "stop", "Q ", "it is 3", row={"answer": 3})

    def client(**args: Any) -> Any:
        return build_rewards([RewardConfig(name="http", args={"retries": 0, **args})], DATA)

    with running(make_app(build_rewards(EXACT, DATA), token=TOKEN)) as url:
        assert ask(url, f"Bearer {TOKEN}") == 200
        for header in (None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN, f"bearer {TOKEN}é"):
            assert ask(url, header) == 401, header
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/health")
        assert client(url=url, token_env="MY_TOKEN").score([sample]) == [1.0]
        with pytest.raises(RewardError, match="answered status 401") as caught:
            client(url=url).score([sample])
        assert TOKEN not in str(caught.value)
    with pytest.raises(RewardError, match="token_env is 'NOT_SET', but this variable is not set"):
        client(url=url, token_env="NOT_SET")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "somewhere.example"])
def test_no_server_that_others_reach_without_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RewardError, match=f"--host is {host}, which others can reach, so the server needs a token"):
        serve_reward(EXACT, DATA, host, 0)


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    of_server = ("--token-file", TOKEN_VARIABLE, RewardError)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(None, *of_server) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "another-token-0123456789")
    assert read_token(None, *of_server) == "another-token-0123456789"
    assert read_token(str(tmp_path / "token"), *of_server) == TOKEN
    (tmp_path / "token").write_text("short")
    with pytest.raises(RewardError, match="must be at least 16 printable ASCII characters") as caught:
        read_token(str(tmp_path / "token"), *of_server)
    assert "short" not in str(caught.value)
    with pytest.raises(RewardError, match="cannot be read"):
        read_token(str(tmp_path / "nothing"), *of_server)


@contextmanager
def started(folder: Path, most_open_files: int = 1024) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server as a process that may open so many files, and its address."""
    (folder / "serve.py").write_text(
        "import resource\nfrom megarl.config.sections import *\nfrom megarl.rewards.server import serve_reward\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most_open_files}, {most_open_files}))\n"
        "data = DataConfig(train=SourceConfig(source='jsonl', path='rows.jsonl'))\n"
        "serve_reward([RewardConfig(name='exact_number')], data, '127.0.0.1', 0, None, lambda line: print(line, flush=True))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(folder / "serve.py")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    deadline = threading.Timer(60, server.kill)
    deadline.start()
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        said = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)/get_reward \(exact_number\); Ctrl-C ends it\n", line)
        assert said
        yield server, said[1]
    finally:
        deadline.cancel()
        server.kill()
        server.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_listens_once_it_does_and_that_it_ended(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path) as (server, url):
        assert server.stdout is not None
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:  # port 0: the one that it was given
            assert json.load(answer)["rewards"] == ["exact_number"]
        server.send_signal(number)
        assert server.stdout.read() == "ended\n"
        assert server.wait() == 0


def test_more_connections_than_the_server_may_open_files_keep_nobody_out(tmp_path: Path) -> None:
    """300 halves of a header took all of 256 descriptors, for as long as their sender liked."""
    with started(tmp_path, most_open_files=256) as (_, url), ExitStack() as held:
        port = int(url.rpartition(":")[2])
        for _ in range(300):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            with suppress(ConnectionError):
                connection.sendall(b"POST /get_reward HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Wait: ")
        for _ in range(5):
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                assert answer.status == 200
