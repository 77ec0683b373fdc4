"""A token for the Ray that a run starts on its own machine.

Ray's ports are open on all interfaces, and whoever reaches one may run code in the job; with a token they answer its own
processes alone, which inherit it. Ray reads the mode when it is imported, so the command sets it before.
"""

from __future__ import annotations

import os
import secrets

MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def want_a_token(ray_address: str | None) -> None:
    """Have a Ray that this process or its children start ask for a token of its own.

    Nothing is set where a run joins another Ray, at `ray_address` or RAY_ADDRESS, or where the user chose a mode.
    """
    if ray_address or os.environ.get("RAY_ADDRESS") or MODE in os.environ:
        return
    os.environ[MODE] = "token"
    if TOKEN_FILE not in os.environ:
        os.environ.setdefault(TOKEN, secrets.token_urlsafe(32))
