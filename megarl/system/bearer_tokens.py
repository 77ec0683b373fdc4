"""Access to megarl's own servers: anybody on this machine, or who brings the token as bearer."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path

from megarl.errors import MegarlError

SHORTEST_TOKEN = 16


def read_token(token_file: str | None, field: str, variable: str, error: Callable[[str], MegarlError]) -> str | None:
    """The token in `token_file`, which `field` names, else in the environment variable `variable`; None without either.

    Raises:
        error: the file cannot be read, or the token is too short to be one.
    """
    if token_file is None:
        where, token = variable, os.environ.get(variable)
    else:
        where = f"{field} {token_file}"
        try:
            token = Path(token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as cause:
            raise error(f"{where} cannot be read: {cause}") from None
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise error(f"the token in {where} must be at least {SHORTEST_TOKEN} printable ASCII characters")
    return token


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
