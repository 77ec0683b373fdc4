"""Asks whether runs still own their folders, before they write further; `owner.py` claims the folders."""

from __future__ import annotations

from collections.abc import Callable

checks: list[Callable[[], None]] = []
"""One for each run in this process, or in the one that forked it; raises OwnerError where another has its folder."""


def check_owned() -> None:
    """Look whether the runs in this process still own their folders.

    Raises:
        OwnerError: another process has taken one over.
    """
    for check in checks:
        check()
