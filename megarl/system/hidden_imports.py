"""Sparing a process packages that libraries import where they can, and that it never uses through them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """While entered, importing one of these modules is an ImportError, unless it is imported already.

    Other threads wait: what is imported inside would be left half done by one that shows the modules again.
    """
    with _ONE_AT_A_TIME:
        absent = [name for name in names if name not in sys.modules]
        sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: importing it is an ImportError
        try:
            yield
        finally:
            for name in absent:
                del sys.modules[name]
