"""The same 40 attacks on each HTTP server of megarl: each comes to nothing, and a good client is served meanwhile.

It waits for a second of the server's work at most: that is CPU time, which does not depend on what else the machine does.

Servers are the real ones on real sockets; only their patience with slow clients is shorter, and 360 connections are all that
one may have.
"""

from __future__ import annotations

import gzip
import json
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any

import pytest

from megarl.system import http_server
from megarl.system.http_connections import Patience, WatchedProtocol
from tests.themes.security.attacked_servers import SERVERS, Answer, Target, answer_on, good_client, is_closed

HEAD_S, STALL_S, REFUSED_S, KEPT_S, LOOK_S = 1.5, 1.5, 0.5, 2, 0.1
MOST_CONNECTIONS = 360
SERVED_S = 1.0
"""CPU seconds that the server may work on what attackers sent before it has answered a good client."""
REFUSED = range(400, 500)


@pytest.fixture(scope="module", params=SERVERS, ids=lambda server: server.__name__)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setattr(WatchedProtocol, "patience", Patience(HEAD_S, STALL_S, REFUSED_S, LOOK_S))
        patch.setattr(http_server, "most_connections", lambda: MOST_CONNECTIONS)
        patch.setattr(http_server, "KEPT_S", KEPT_S)
        yield stack.enter_context(request.param(tmp_path_factory.mktemp("attacked")))


def _connections(at: Target, number: int) -> list[socket.socket]:
    return [at.connect() for _ in range(number)]


def _all_end(connections: list[socket.socket], within_s: float) -> None:
    ends_at = time.monotonic() + within_s
    assert all(is_closed(one, max(0.01, ends_at - time.monotonic())) for one in connections)
    for one in connections:
        one.close()


def _head(at: Target, **changed: str | None) -> bytes:
    """A header that announces a body of 1,000 bytes to where the server takes one."""
    return at.request("POST", at.post or at.good, b"", content_length="1000", **changed)


# time and connections -------------------------------------------------------------------------------------------------


def half_headers_of_300_strangers(at: Target) -> None:
    connections = _connections(at, 300)
    for one in connections:
        with suppress(ConnectionError):
            one.sendall(f"POST {at.post or at.good} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Wait: ".encode())
    time.sleep(0.3)
    at.is_served()
    _all_end(connections, HEAD_S + 3)


def silence_of_300_strangers(at: Target) -> None:
    connections = _connections(at, 300)
    time.sleep(0.3)
    at.is_served()
    _all_end(connections, HEAD_S + 3)


def a_header_byte_by_byte(at: Target) -> None:
    with at.connect() as connection, suppress(ConnectionError):
        ends_at = time.monotonic() + HEAD_S + 3
        for byte in at.request("GET", at.good, None, x_long="x" * 10_000):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
            assert time.monotonic() < ends_at, "it goes on as long as the client likes"


def half_bodies_of_300(at: Target) -> None:
    connections = _connections(at, 300)
    for one in connections:
        with suppress(ConnectionError):
            one.sendall(_head(at) + b'{"query": [')
    time.sleep(0.3)
    at.is_served()
    _all_end(connections, STALL_S + REFUSED_S + 3)


def a_body_byte_by_byte(at: Target) -> None:
    with at.connect() as connection, suppress(ConnectionError):
        connection.sendall(_head(at))
        ends_at = time.monotonic() + STALL_S + REFUSED_S + 3
        while True:
            connection.sendall(b" ")
            time.sleep(0.05)
            assert time.monotonic() < ends_at, "it goes on as long as the client likes"


def chunks_without_an_end(at: Target) -> None:
    with at.connect() as connection:
        connection.sendall(at.request("POST", at.post or at.good, b"", content_length=None, transfer_encoding="chunked"))
        ends_at = time.monotonic() + STALL_S + REFUSED_S + 3
        with suppress(ConnectionError):
            while True:
                connection.sendall(b"1\r\n \r\n")
                time.sleep(0.05)
                assert time.monotonic() < ends_at, "it goes on as long as the client likes"


def a_flood_of_chunks(at: Target) -> None:
    """As fast as the server reads, to beyond its limit."""
    with at.connect() as connection:
        connection.sendall(at.request("POST", at.post or at.good, b"", content_length=None, transfer_encoding="chunked"))
        chunk, sent = b"100000\r\n" + b" " * (1 << 20) + b"\r\n", 0
        with suppress(ConnectionError, TimeoutError):
            while sent <= at.most_bytes + (8 << 20):
                connection.sendall(chunk)
                sent += 1 << 20
        assert answer_on(connection).status in (0, *REFUSED)


def answers_that_are_not_read(at: Target) -> None:
    """Requests without end; the server stops once its buffers are full, and leaves the client then."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", at.port))
        connection.settimeout(0.2)
        watch, requests, ends_at = select.poll(), at.request("GET", at.good) * 100, time.monotonic() + 60
        watch.register(connection, select.POLLHUP | select.POLLERR)
        while not watch.poll(50):
            assert time.monotonic() < ends_at, "the server waits as long as the client likes"
            with suppress(OSError):
                connection.sendall(requests)


def connections_kept_without_a_request(at: Target) -> None:
    connections = _connections(at, 300)
    for one in connections:
        with suppress(ConnectionError):
            one.sendall(at.request("GET", at.good))
            answer_on(one, "GET")
    at.is_served()
    _all_end(connections, KEPT_S + 3)


def resets_half_way(at: Target) -> None:
    for _ in range(100):
        one = at.connect()
        one.sendall(_head(at) + b"[")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()


def a_thousand_requests_in_one_packet(at: Target) -> None:
    with at.connect() as connection, suppress(ConnectionError):
        connection.sendall(at.request("GET", at.good) * 1000)
        assert answer_on(connection, "GET").status in (200, 503)


def a_wait_for_continue(at: Target) -> None:
    with at.connect() as connection:
        connection.sendall(_head(at, expect="100-continue"))
        assert is_closed(connection, HEAD_S + STALL_S + REFUSED_S + KEPT_S + 3)


# sizes ----------------------------------------------------------------------------------------------------------------


def a_header_of_a_megabyte(at: Target) -> None:
    assert at.talk(at.request("GET", at.good, None, x_long="x" * (1 << 20)), "GET").status in (0, *REFUSED)


def twenty_thousand_headers(at: Target) -> None:
    many = {f"x{number}": "1" for number in range(20_000)}
    assert at.talk(at.request("GET", at.good, None, **many), "GET").status in (0, *REFUSED)


def a_path_of_a_megabyte(at: Target) -> None:
    assert at.talk(at.request("GET", at.good + "/a" * (1 << 19)), "GET").status in (0, *REFUSED)


def a_body_said_to_be_a_terabyte(at: Target) -> None:
    answer = at.talk(at.request("POST", at.post or at.good, b"{", content_length=str(1 << 40)))
    assert answer.status == 413


def a_chunk_said_to_be_huge(at: Target) -> None:
    head = at.request("POST", at.post or at.good, b"", content_length=None, transfer_encoding="chunked")
    for size in (b"FFFFFFFFFFFFFFFF", b"FFFFFFFFFFFFFFFFFFFFFFFF", b"-1", b"0x10", b"1;" + b"x" * (1 << 20)):
        with at.connect() as connection:
            with suppress(ConnectionError):
                connection.sendall(head + size + b"\r\n" + b" " * 100)
            assert is_closed(connection, STALL_S + REFUSED_S + 3)


def bombs_of_gzip_and_deflate(at: Target) -> None:
    for packed, bomb in (("gzip", gzip.compress(bytes(300 << 20), 1)), ("deflate", zlib.compress(bytes(300 << 20), 1))):
        answer = at.posted(bomb, content_encoding=packed)
        assert answer.status in ((413,) if at.post and not _packs_its_own(at) else REFUSED)


def a_bomb_of_zstd(at: Target) -> None:
    bomb = pytest.importorskip("zstandard").compress(bytes(300 << 20))
    assert at.posted(bomb, content_encoding="zstd").status in REFUSED
    if _packs_its_own(at):
        kind = {"content_type": "application/x-protobuf", "content_encoding": "zstd"}
        assert at.talk(at.request("POST", "/api/v1/forward_backward", bomb, **kind)).status in REFUSED


@lru_cache(maxsize=1)
def _texts(size: int) -> bytes:
    """Made once, as that keeps the other threads of this process waiting."""
    return json.dumps({"query": ["p 1" + "x" * 1000] * (size // 1010), "prompts": [], "labels": []}).encode()


def json_of_70_megabytes(at: Target) -> None:
    """Texts, as those who have a token may send them; who may not is told so at once."""
    assert at.posted(_texts(min(70 << 20, at.most_bytes - 1000) if at.post else 70 << 20)).status in REFUSED


def json_of_many_small_values(at: Target) -> None:
    for value in (b"0", b"[]", b'""', b"{}"):
        body = b'{"query": [' + (value + b",") * (6 << 20) + value + b"]}"
        assert at.posted(body).status in REFUSED


# what two readers could read in two ways ------------------------------------------------------------------------------


def a_length_and_chunks(at: Target) -> None:
    hidden = at.request("GET", "/hidden")
    head = at.request("POST", at.post or at.good, b"", content_length="4", transfer_encoding="chunked")
    assert at.talk(head + b"0\r\n\r\n" + hidden).status == 400


def two_lengths(at: Target) -> None:
    head = at.request("POST", at.post or at.good, b"", content_length="4\r\ncontent-length: 40")
    assert at.talk(head + b"{}  " + at.request("GET", "/hidden")).status == 400


def lengths_that_are_no_number(at: Target) -> None:
    for length in ("-1", "+5", "1e3", "0x10", "5 5", "\xb2", "1_0", "", "9" * 400):
        head = at.request("POST", at.post or at.good, b"", content_length=length)
        assert at.talk(head + b"{}").status in (400, 413), length


def chunks_by_another_name(at: Target) -> None:
    for name in ("xchunked", "chunked, identity", "gzip, chunked", "\x0bchunked", "chunked\r\ntransfer-encoding: x"):
        head = at.request("POST", at.post or at.good, b"", content_length=None, transfer_encoding=name)
        assert at.talk(head + b"0\r\n\r\n").status in (400, 501), name
    spaced = at.request("POST", at.post or at.good, b"{}").replace(
        b"content-length:", b"transfer-encoding : chunked\r\ncontent-length:"
    )
    assert at.talk(spaced).status == 400


def lines_that_end_in_another_way(at: Target) -> None:
    plain = at.request("GET", at.good, None, x_one="1")
    for odd in (
        plain.replace(b"x-one: 1", b"x-one: 1\rx-two: 2"),
        plain.replace(b"x-one: 1", b"x-one: \x001"),
        b"\x00" + plain,
    ):
        assert at.talk(odd, "GET").status == 400


def requests_of_another_protocol(at: Target) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)
    for odd in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /\r\n\r\n", hello + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        assert at.talk(odd, "GET").status in (0, 400, 505)


def an_upgrade_to_websockets(at: Target) -> None:
    for protocol, more in (("websocket", {"sec_websocket_key": "x" * 22 + "==", "sec_websocket_version": "13"}), ("h2c", {})):
        answer = at.talk(at.request("GET", at.good, None, connection="upgrade", upgrade=protocol, **more), "GET")
        assert answer.status in (200, 503, *REFUSED)


def two_hosts_and_a_url_for_a_path(at: Target) -> None:
    two = at.request("GET", at.good, None, host="127.0.0.1\r\nhost: evil.example")
    inside = at.request("GET", f"http://evil.example{at.good}")
    user = at.request("GET", at.good, None, host="127.0.0.1@evil.example")
    assert [at.talk(one, "GET").status for one in (two, inside)] == [400, 400]
    assert at.talk(user, "GET").status in (REFUSED if at.is_open else (200, 400))


# web pages ------------------------------------------------------------------------------------------------------------


def a_name_that_leads_here(at: Target) -> None:
    """A page of evil.example whose name was turned to this machine, so that the browser lets it read answers."""
    for host in (
        "evil.example",
        f"evil.example:{at.port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[",
        "2130706433",
    ):
        for forwarded in (None, "127.0.0.1"):
            changed = {
                **({} if at.is_open else at.stranger()),
                "host": host,
                "x_forwarded_host": forwarded,
                "forwarded": forwarded,
            }
            assert at.talk(at.request("GET", at.good, None, **changed), "GET").status in (400, 403 if at.is_open else 401), host


def a_post_of_a_foreign_page(at: Target) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:1", f"http://127.0.0.1.evil.example:{at.port}"):
        answer = at.posted(at.body, origin=origin)
        assert answer.status == (403 if at.post else answer.status)
        assert answer.status in REFUSED
        assert "access-control-allow-origin" not in answer.headers
        assert at.talk(at.request("GET", at.good, None, origin=origin), "GET").status == 403


def a_form_of_a_foreign_page(at: Target) -> None:
    """What a page may send without asking the server first."""
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        None,
        "text/plain; x=application/json",
    ):
        answer = at.posted(at.body, content_type=kind, **({} if at.is_open else at.stranger()))
        assert answer.status in ((415,) if at.is_open and at.post else REFUSED), kind


def wrong_secrets(at: Target) -> None:
    for name, secret in at.secret.items():
        if name == "X-API-Key":  # without tenants any key is that of the one tenant
            continue
        wrong = [
            *(secret[:length] for length in range(0, len(secret), 7)),
            secret + "x",
            secret.swapcase(),
            "Bearer",
            "Bearer \xe9",
            "Basic eA==",
        ]
        for brought in wrong:
            answer = at.posted(at.body, authorization=brought)
            assert answer.status == 401, brought
            assert secret.removeprefix("Bearer ").encode() not in answer.body


# what is in bodies and paths ------------------------------------------------------------------------------------------


def _packs_its_own(at: Target) -> bool:
    """Whether it is `megarl serve`, whose JSON is never packed, and whose protobuf is by zstd."""
    return at.post == "/api/v1/create_session"


def bytes_that_are_not_packed(at: Target) -> None:
    cut = gzip.compress(at.body)[:-4]
    for packed, body in (
        ("gzip", b"no gzip"),
        ("deflate", b"no deflate"),
        ("gzip", cut),
        ("gzip", gzip.compress(b"{}") + b"x"),
        ("zstd", b"x"),
    ):
        answer = at.posted(body, content_encoding=packed)
        assert answer.status in ((400, 422) if at.post else REFUSED), packed


def an_encoding_that_does_not_exist(at: Target) -> None:
    for packed in ("martian", "gzip, gzip", "br", "\xe9", "rot13"):
        answer = at.posted(at.body, content_encoding=packed)
        assert answer.status in ((200, 400) if _packs_its_own(at) else (400,) if at.post else REFUSED), packed


def a_charset_that_does_not_exist(at: Target) -> None:
    for charset in ("martian", "utf-7", "idna", "zlib_codec", "utf-16", "\xe9", '"'):
        answer = at.posted(at.body or b"{}", content_type=f"application/json; charset={charset}")
        assert answer.status == (400 if at.post else 413), charset


def json_that_is_none(at: Target) -> None:
    deep = b"[" * 200_000
    for body in (
        *(b'{"query": ' + value for value in (deep, b"{" * 3, b'{"a":' * 100_000, b"NaN}", b"Infinity}")),
        *(b'{"query": ' + value + b"}" for value in (b"1" * 5000, b"1e999999", b"0x1", b"01")),
        *(b'{"query": ["' + text + b'"]}' for text in (b"\\ud800", b"\xff", b"\x00", b"\\u00")),
        *('{"query": []}'.encode(coding) for coding in ("utf-16", "utf-32", "utf-8-sig")),
        b'{"query": [], "query": 3, "tags": 1, "tags": 2, "messages": [], "messages": 4}',
        b"", b"null", b"3", b'"x"', b"{}x", b"{'query': []}", b'{"query": [],}', b"\x80",
    ):  # fmt: skip
        assert at.posted(body).status in REFUSED, body[:40]


def paths_to_files(at: Target) -> None:
    for path in (
        "/../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2f..%2fetc%2fpasswd", "//etc/passwd",
        "/./config.yaml",
        "/%00", f"{at.good.partition('?')[0]}%00", "/%0d%0aX-Injected:%201", "/%ff%fe", "/%", "/%zz", "/\\..\\..",
        "/config.yaml", "/%252e%252e/",
        "/*", "/?%00", "/;/x", "/v1/models/%2e%2e", "/api/v1/../../etc/passwd",
    ):  # fmt: skip
        answer = at.talk(at.request("GET", path), "GET")
        assert answer.status in (*REFUSED, 200 if path == "/?%00" and at.good.startswith("/rows") else 400), path
        assert "x-injected" not in answer.headers
        assert "location" not in answer.headers


def other_methods(at: Target) -> None:
    for method in ("TRACE", "PUT", "DELETE", "PATCH", "CONNECT", "OPTIONS", "get", "GETT", "PROPFIND", "\x01"):
        answer = at.talk(at.request(method, at.good, None, x_echo="mark-of-this-test"), method)
        assert answer.status in REFUSED, method
        assert b"mark-of-this-test" not in answer.body
    overridden = at.request("GET", at.post or "/none", None, x_http_method_override="POST")
    assert at.talk(overridden, "GET").status in REFUSED
    assert at.talk(at.request("HEAD", at.good), "HEAD").body == b""


def headers_in_what_is_sent(at: Target) -> None:
    """Line ends in values that an answer might repeat."""
    mark = "x%0d%0aX-Injected:%201"
    for path in (f"{at.good}{'&' if '?' in at.good else '?'}a={mark}", f"/{mark}", f"/v1/models/{mark}"):
        for more in ({}, {"accept": "\tx\x85X-Injected: 1"}, {"x_idempotency_key": mark}):
            answer: Answer = at.talk(at.request("GET", path, None, **more), "GET")
            assert answer.status in (200, 503, *REFUSED)
            assert not [name for name in answer.headers if "injected" in name]


ATTACKS: list[Callable[[Target], Any]] = [
    half_headers_of_300_strangers, silence_of_300_strangers, a_header_byte_by_byte, half_bodies_of_300, a_body_byte_by_byte,
    chunks_without_an_end, a_flood_of_chunks, answers_that_are_not_read, connections_kept_without_a_request, resets_half_way,
    a_thousand_requests_in_one_packet, a_wait_for_continue,
    a_header_of_a_megabyte, twenty_thousand_headers, a_path_of_a_megabyte, a_body_said_to_be_a_terabyte,
    a_chunk_said_to_be_huge,
    bombs_of_gzip_and_deflate, a_bomb_of_zstd, json_of_70_megabytes, json_of_many_small_values,
    a_length_and_chunks, two_lengths, lengths_that_are_no_number, chunks_by_another_name, lines_that_end_in_another_way,
    requests_of_another_protocol, an_upgrade_to_websockets, two_hosts_and_a_url_for_a_path,
    a_name_that_leads_here, a_post_of_a_foreign_page, a_form_of_a_foreign_page, wrong_secrets,
    bytes_that_are_not_packed, an_encoding_that_does_not_exist, a_charset_that_does_not_exist, json_that_is_none,
    paths_to_files, other_methods, headers_in_what_is_sent,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_comes_to_nothing(target: Target, attack: Callable[[Target], Any]) -> None:
    if target.post:
        assert target.posted(target.body).status == 200
    with good_client(target) as took:
        attack(target)
    assert max(took) < SERVED_S, sorted(took)[-5:]


def test_a_good_client_is_answered_before_a_large_body_is_parsed(target: Target) -> None:
    """Both have been asked, the body first; when the good client has its answer, there is none to the body yet."""
    if not target.post:
        pytest.skip("it takes no bodies")
    body = _texts(min(70 << 20, target.most_bytes - 1000))
    path = target.large or target.post
    with target.connect(60.0) as large:
        large.sendall(target.request("POST", path, body))
        target.is_served()
        assert not select.select([large], [], [], 0)[0], "the body was parsed first"
        assert answer_on(large).status in REFUSED
