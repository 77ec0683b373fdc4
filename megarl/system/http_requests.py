"""Requests that bring a token, by Python's own client: to the server that was named, and to no other.

urllib follows redirects and takes the header with the token along, to whatever host the server names.
"""

from __future__ import annotations

import urllib.request
from http.client import HTTPMessage, HTTPResponse
from typing import IO, cast


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
