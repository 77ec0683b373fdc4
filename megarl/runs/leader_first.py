"""Work that one process of a torchrun world does before there are process groups, while all others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megarl.errors import MegarlError
from megarl.system.torchrun import is_torchrun

_MEETING = "megarl/leader_first"
_LONGEST_WORK = timedelta(days=1)
_store: Any = None
"""Kept: where rank 0 serves it, it ends with the object."""


def leader_first(work: Callable[[], None]) -> None:
    """Do `work`; in a world of torchrun rank 0 alone does it, before there are process groups, and all others wait for it.

    Raises:
        MegarlError: what `work` raised on rank 0, there, and its sentence on the others.
    """
    global _store
    if not is_torchrun():
        work()
        return
    import torch

    _store, rank, _ = next(torch.distributed.rendezvous("env://"))
    if rank:
        _store.wait([_MEETING], _LONGEST_WORK)
        if failed := _store.get(_MEETING).decode():
            raise MegarlError(failed)
        return
    failure = "rank 0 failed before it joined the others"
    try:
        work()
        failure = ""
    except MegarlError as error:
        failure = str(error)
        raise
    finally:
        _store.set(_MEETING, failure)
