"""Engines that fail are started anew; how often they failed is counted, and said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megarl.errors import EngineError, MegarlError
from megarl.rollout.scheduling.engine_state import FAILURES, EngineState, PromptRequest


class EngineRestarts:
    """A failure that cannot be mended ends the run; but it goes on without an engine that is dispensable."""

    def __init__(
        self,
        deadline_s: float,
        say: Callable[[str], None] | None,
        give_up: Callable[[BaseException], None],
        has_ended: Callable[[], None],
    ) -> None:
        """`deadline_s`: for each try. `say` is told in a line when an engine fails, `has_ended` called after each restart."""
        self.deadline_s = deadline_s
        self._say, self._give_up, self._has_ended = say, give_up, has_ended
        self._retried: dict[int, int] = {}  # failures by group, on engines that were well

    def start(self, engine: EngineState) -> None:
        """In the loop: start an engine anew, if it is not well, nobody does yet, and it has not left."""
        if engine.restarting is None and not engine.is_absent:
            engine.restarting = asyncio.get_running_loop().create_task(self._restart(engine))

    async def _restart(self, engine: EngineState) -> None:
        try:
            if engine.failures > FAILURES:
                raise EngineError(
                    f"engine {engine.number} failed {engine.failures} times in a row, at last with: {engine.error}"
                )
            await engine.come_back(self.deadline_s)
        except MegarlError as error:
            if not engine.is_dispensable:
                self._give_up(error)
                return
            engine.is_left_out = engine.rests = True
            self._tell(f"{error}; the run goes on without it")
            await engine.handle.end()
        finally:
            engine.restarting = None
            self._has_ended()

    def note(self, engine: EngineState, error: Exception) -> None:
        """Count a failure, and say it."""
        engine.failures += 1
        engine.failed_times += 1
        self._tell(f"engine {engine.number} failed: " + f"{error}".partition("\n")[0])

    def note_request(self, request: PromptRequest, error: Exception) -> None:
        """Count a failure of a request on an engine that is well; one that fails again and again ends the run."""
        request.failures += 1
        for number in (number for number in request.numbers if number is not None):
            self._retried[number] = self._retried.get(number, 0) + 1
        if max([request.failures, *(self._retried[n] for n in request.numbers if n is not None)]) >= FAILURES:
            self._give_up(error)

    def _tell(self, line: str) -> None:
        if self._say is not None:
            self._say(line)
