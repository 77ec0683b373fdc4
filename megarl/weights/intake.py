"""One update of an engine: each of its ranks takes what all its senders put before it, at the same time, until it ends.

The engine's owner opens the intake with one request to the server, and ends it. In between nothing passes through SGLang:
senders put messages before a rank, and read its answers, in the store that the engine's owner keeps. A message is a payload
(`payloads.py`) with a code that only who knows the server's token can make.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError, TCPStore

from megarl.errors import EngineError

OPEN = "intake"
"""The store's key for the number of the intake that is open; empty: none is."""
LOOK_S = 0.5
"""How often who waits for an answer looks whether the engine has failed."""


class Intake(NamedTuple):
    """Values by which a rank of an engine takes part. `token`: the server's, with which messages are signed.

    A rank leaves when nothing has been put before it for `timeout_s` seconds.
    """

    number: int
    store: tuple[str, int]
    token: str
    timeout_s: float

    def message(self, rank: int, index: int) -> str:
        """The key of the `index`-th message that is put before a rank."""
        return f"intake/{self.number}/{rank}/{index}"

    def left(self, rank: int) -> str:
        """The key by which a rank says that it has left: empty, or why it could not take everything."""
        return f"intake/{self.number}/{rank}/left"

    @property
    def failed(self) -> str:
        """The key by which senders are told that the engine takes nothing more, and why."""
        return f"intake/{self.number}/failed"

    def put(self, store: TCPStore, rank: int, payload: bytes) -> str:
        """Put a message before a rank, an empty one to have it leave; returns the key of the rank's answer."""
        name = self.message(rank, store.add(f"intake/{self.number}/{rank}/count", 1) - 1)
        store.set(name, self._code(name, payload) + payload)  # type: ignore[arg-type]
        return f"{name}/taken"

    def read(self, name: str, message: bytes) -> bytes:
        """The payload of a message; raises ValueError if its sender does not know the token."""
        size = hashlib.sha256().digest_size
        code, payload = message[:size], message[size:]
        if not hmac.compare_digest(code, self._code(name, payload)):
            raise ValueError(f"{name} was not put there by a sender of this run")
        return payload

    def _code(self, name: str, payload: bytes) -> bytes:
        return hmac.digest(self.token.encode(), name.encode() + b"\0" + payload, hashlib.sha256)


def give_up(store: TCPStore, reason: str) -> None:
    """Have all senders of the update that is open hear that one failed, so that they do not wait for it."""
    with contextlib.suppress(RuntimeError):  # who waits hears it from the store, too, if that is gone
        if store.check([OPEN]) and (number := store.get(OPEN).decode()):
            store.set(Intake(int(number), ("", 0), "", 0).failed, reason)


class PutBefore:
    """Payloads that a sender has put before an engine's ranks, until all have taken them."""

    def __init__(self, url: str, where: tuple[str, int], token: str, payloads: Sequence[str | None], timeout_s: float) -> None:
        """Put one payload before each rank; None: there is nothing for this one. `url` names the engine in errors.

        Raises:
            EngineError: no update is open, or the engine's store does not answer.
        """
        self._url, self._timeout_s, self._ends_at = url, timeout_s, time.monotonic() + timeout_s
        self._error: str | None = None
        try:
            self._store = TCPStore(*where, is_master=False, timeout=timedelta(seconds=timeout_s))
            number = self._store.get(OPEN).decode() if self._store.check([OPEN]) else ""
            if not number:
                order = "sending must run between begin_weight_update and end_weight_update"
                raise EngineError(f"{url} has no weight update open: {order}")
            self._intake = Intake(int(number), where, token, timeout_s)
            self._left = [
                self._intake.put(self._store, rank, payload.encode())
                for rank, payload in enumerate(payloads)
                if payload is not None
            ]
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def ended(self) -> bool:
        """Return whether all ranks have taken what was put before them, or it is known that one does not."""
        return self._ended(0)

    def _ended(self, wait_s: float) -> bool:
        if self._error is not None or not self._left:
            return True
        try:
            if wait_s:
                self._store.wait(self._left, timedelta(seconds=wait_s))
            elif not self._store.check(self._left):
                return self._look_for_failure()
            answers = [self._store.get(key).decode() for key in self._left]
            for key in self._left:
                self._store.delete_key(key)
        except DistStoreError:  # not in this time
            return self._look_for_failure()
        except RuntimeError as error:
            self._error = str(self._unreachable(error))
            return True
        self._left = []
        reasons = [answer for answer in answers if answer]
        self._error = f"{self._url} could not take the weights: {reasons[0]}" if reasons else None
        return True

    def _look_for_failure(self) -> bool:
        try:
            if self._store.check([self._intake.failed]):
                self._error = self._store.get(self._intake.failed).decode()
            elif time.monotonic() > self._ends_at:
                self._error = f"{self._url} did not take the weights within {self._timeout_s:g} s"
        except RuntimeError as error:
            self._error = str(self._unreachable(error))
        return self._error is not None

    def raise_if_failed(self) -> None:
        """Raise EngineError if it is known that a rank did not take them."""
        if self._error is not None:
            raise EngineError(self._error)

    def result(self) -> None:
        """Wait until all have taken them; raises EngineError if one does not."""
        while not self._ended(LOOK_S):
            pass
        self.raise_if_failed()

    def _unreachable(self, error: RuntimeError) -> EngineError:
        return EngineError(f"the store of {self._url} does not answer: {error}")
