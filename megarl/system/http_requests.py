"""Requests to servers that are not trusted: a token goes to the server that was named, and answers are read up to a limit.

urllib follows redirects and takes the header with the token along, to whatever host the server names; aiohttp unpacks
whatever comes, a gigabyte out of a megabyte.
"""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPMessage, HTTPResponse
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES = 16 << 20
"""The longest answer, unpacked, that is read of a server, unless much more is asked of it."""


class AnswerError(Exception):
    """An answer is longer than it may be, or no JSON; the text says which, for a sentence that begins with the URL."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: object, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str) -> None:
        """None: the redirect is an error as any other status is."""


_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.UnknownHandler,
    urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor, _NoRedirect,
):  # fmt: skip
    _OPENER.add_handler(_handler())  # of http and https alone: no files


def open_url(request: urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """The server's answer, to be closed by the caller.

    Raises:
        urllib.error.HTTPError: a status that is no success; a redirect, which is not followed, is one.
        OSError: the server cannot be reached.
    """
    return cast("HTTPResponse", _OPENER.open(request, timeout=timeout_s))


def read_answer(answer: IO[bytes], most_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """The body of what `open_url` returns, or raises, which unpacks nothing.

    Raises:
        AnswerError: it has more than `most_bytes`.
    """
    body = answer.read(most_bytes + 1)
    if len(body) > most_bytes:
        raise _too_long(most_bytes)
    return body


async def read_unpacked(answer: aiohttp.ClientResponse, most_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """The body of aiohttp's answer, unpacked.

    Raises:
        AnswerError: it has more than `most_bytes`; no more than that is held.
    """
    body = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        body += part
        if len(body) > most_bytes:
            raise _too_long(most_bytes)
    return bytes(body)


def parsed(body: bytes) -> Any:
    """The JSON that a body in UTF-8 is.

    Raises:
        AnswerError: it is none, or nested too deeply.
    """
    text = body.decode(errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise AnswerError(f"answered what is no JSON: {shortened(text)}") from None


def shortened(text: str) -> str:
    """`text` on a line of 200 characters at most, quoted."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 200 else line[:197] + "...")


def _too_long(most_bytes: int) -> AnswerError:
    return AnswerError(f"answered with more than {most_bytes >> 20} MiB")
