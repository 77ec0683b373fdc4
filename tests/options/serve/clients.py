"""Clients of the package end with the tests that made them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tinker.lib.internal_client_holder import InternalClientHolder


@contextmanager
def closed_afterwards() -> Iterator[None]:
    """Close every connection that is opened in here, however it was made (by a pickle, by a session's client).

    A client that is only forgotten asks its server, which is gone, for a sign of life until the process ends: it says so every
    few seconds, and allocates memory while another test counts it."""
    opened: list[InternalClientHolder] = []
    original = InternalClientHolder.__init__

    def init(self: InternalClientHolder, *args: Any, **kwargs: Any) -> None:
        opened.append(self)
        original(self, *args, **kwargs)

    try:
        with patch.object(InternalClientHolder, "__init__", init):
            yield
    finally:
        for holder in opened:
            if holder._begin_close():
                holder.run_coroutine_threadsafe(holder._async_cleanup()).result(30)
