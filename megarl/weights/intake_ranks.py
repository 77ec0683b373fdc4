"""A rank's side of an intake (`intake.py`): messages are taken by several threads at once; runs inside the server."""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from megarl.weights.intake import Intake

THREADS = 4
"""Messages that a rank takes at once, of senders that staged what they send."""

_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="intake")
"""Kept, with what each of its threads keeps (`options/transports/reader.py`), from update to update."""


class RankIntake:
    """Messages that one rank takes until an empty one comes."""

    def __init__(self, intake: Intake, rank: int, device: torch.device) -> None:
        self._intake, self._rank, self._device = intake, rank, device
        self._waits, self._answers = (
            TCPStore(*intake.store, is_master=False, timeout=timedelta(seconds=intake.timeout_s)) for _ in range(2)
        )
        self._lock = threading.Lock()
        self._errors: list[str] = []
        self._has_ended = False

    def take_all(self, take: Callable[[Any], Future[None] | None], give_up: Callable[[], None]) -> None:
        """Take every message and answer it; then leave, saying whether all were taken.

        `take(payload)` is called in one of `THREADS` threads. If it returns a future, the message is answered when that is
        done. `give_up` is called when nothing more will come, and behind each `take` that returns later than that: it ends such
        futures.
        """

        def take_one(payload: Any) -> Future[None] | None:
            later = take(payload)
            if self._has_ended:
                give_up()
            return later

        taken: list[Future[None]] = []
        index = 0
        # who can't reach the store can't be told anything, and the server must go on
        with contextlib.suppress(RuntimeError):
            while (message := self._next(index)) is None or message[1]:
                index += 1
                if message is not None:
                    taken.append(Future())
                    _pool.submit(self._work, *message, take_one, taken[-1])
        self._has_ended = True
        give_up()
        for done in taken:
            done.result()
        with contextlib.suppress(RuntimeError):
            self._waits.set(self._intake.left(self._rank), self._errors[0] if self._errors else "")

    def _next(self, index: int) -> tuple[str, bytes] | None:
        """The name and the payload of a message; None: it is not one of ours."""
        name = self._intake.message(self._rank, index)
        message = self._waits.get(name)
        self._waits.delete_key(name)
        try:
            return name, self._intake.read(name, message)
        except ValueError as error:
            self._answer(name, error)
            return None

    def _work(self, name: str, payload: bytes, take: Callable[[Any], Future[None] | None], done: Future[None]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            later = take(pickle.loads(base64.b64decode(payload)))
        except Exception as error:  # noqa: BLE001 - the sender must hear of it, and the server go on
            later = Future()
            later.set_exception(error)
        if later is None:
            later = Future()
            later.set_result(None)

        def end(of: Future[None]) -> None:
            self._answer(name, of.exception())
            done.set_result(None)

        later.add_done_callback(end)

    def _answer(self, name: str, error: BaseException | None) -> None:
        said = f"{error}" if error is not None else ""
        with self._lock, contextlib.suppress(RuntimeError):
            self._errors += [said] if said else []
            self._answers.set(f"{name}/taken", said)
