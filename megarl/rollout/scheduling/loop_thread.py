"""An asyncio loop in a thread of its own, to which all state of a scheduler belongs."""

from __future__ import annotations

import asyncio
import selectors
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from megarl.errors import DeadlineError

T = TypeVar("T")
P = ParamSpec("P")
JOIN_S = 10.0
OURS = str(Path(__file__).parents[2])
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class LoopThread:
    """The loop runs from here on until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Return whether the loop runs."""
        return self.loop.is_running()

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float = 60.0) -> T:
        """Do `work` in the loop, called from any other thread, and wait for what it returns.

        Raises:
            DeadlineError: it was not done after `deadline_s` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(deadline_s)
        except KeyboardInterrupt:
            future.cancel()  # else it is still pending when the loop is closed, and asyncio says so
            raise
        except TimeoutError:
            future.cancel()
            frame = sys._current_frames().get(self._thread.ident or 0)
            raise DeadlineError(_why_late(getattr(work, "__name__", "work"), frame, deadline_s)) from None

    def close(self) -> None:
        """Stop the loop, whose work must be done, and the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=JOIN_S)
        if not self.loop.is_running():
            self.loop.close()


def _why_late(work: str, frame: FrameType | None, deadline_s: float) -> str:
    """The sentence about a loop that has not done `work`, by where its thread is now."""
    if frame is None or frame.f_code.co_filename == selectors.__file__:
        return f"the rollout event loop did not finish '{work}' within {deadline_s:.0f} s, and has nothing else to do"
    late = f"the rollout event loop did not answer within {deadline_s:.0f} s: it is still in"
    stack = [(at.filename, at.lineno, at.name) for at in reversed(traceback.extract_stack(frame))]  # innermost first
    users = [at for at in stack if not at[0].startswith((OURS, *INSTALLED)) and not at[0].startswith("<")]
    ours = [at for at in stack if at[0].startswith(OURS)]
    file, line, name = (users or ours or stack)[0]
    if users:
        return f"{late} '{name}' ({file}, line {line}), which blocks it: await that work, or run it in a thread"
    return f"{late} its own '{name}' ({file}, line {line}), before it came to '{work}'; no episode of yours blocks it"


class HasLoop(Protocol):
    """An object whose state belongs to the loop of its `thread`."""

    thread: LoopThread


OfLoop = TypeVar("OfLoop", bound=HasLoop)


def in_loop(
    method: Callable[Concatenate[OfLoop, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[OfLoop, P], T]:
    """Make a coroutine method one that any other thread calls: it runs in the loop, and its caller waits for the answer."""

    @wraps(method)
    def called(self: OfLoop, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.run(method(self, *args, **kwargs))

    return called
