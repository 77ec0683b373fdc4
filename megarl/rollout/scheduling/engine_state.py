"""One engine as the scheduler sees it: how it is reached, which weights it has, and what it works on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from megarl.data.sample import Prompt, Sample
from megarl.errors import DeadlineError, EngineError, WorkerError
from megarl.observe.run_state import EngineCondition, EngineStatus
from megarl.observe.trace import BusySpans
from megarl.rollout.engines.capacity import UNKNOWN, EngineCapacity
from megarl.rollout.engines.protocol import Begun, EngineRequest
from megarl.rollout.engines.stored_turns import SampledTurn
from megarl.rollout.scheduling.engine_handle import EngineHandle
from megarl.rollout.scheduling.partial_groups import PartialGroup

HEALTH_S = 10.0
"""For an engine to say that it is well."""
FAILURES = 3
"""Failures of an engine in a row, or of a request on engines that are well, before the run ends with the last sentence."""
END_S = 10.0
"""For an engine to free what it keeps for conversations."""
GenerateGroups = Callable[["AskedGroups"], Awaitable[list[list[Sample]]]]
"""Answers the prompts of a request: a group of samples for each."""
PendingResult = asyncio.Future[list[list[Sample]]]


@dataclass
class EngineState:
    """One engine as the scheduler sees it. It serves while `version` is that of its weights (None: of no known version)."""

    number: int
    handle: EngineHandle
    keeps_turns: bool = False
    """Whether it wants to know which conversation a turn goes on with."""
    version: int | None = None
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while requests may reach the engine: not during a weight update."""
    requests: dict[asyncio.Task[None], PromptRequest] = field(default_factory=dict)
    load: int = 0
    """Responses that it works on, as far as it is known which have ended; counted by `EngineOrder`, as are the next three."""
    asked: int = 0
    """Responses of the requests that it works on, ended or not."""
    groups: int = 0
    prompt_tokens: int = 0
    """Of the prompts of these groups, each counted once: its responses share it."""
    capacity: EngineCapacity = UNKNOWN
    watch: asyncio.Task[None] | None = None
    """Asks which responses have ended."""
    failures: int = 0
    """In a row."""
    failed_times: int = 0
    error: Exception | None = None
    """Why it failed last."""
    restarting: asyncio.Task[None] | None = None
    fell_behind: bool = False
    """Failed since the update began that is under way, and so cannot have what that update gave it."""
    is_dispensable: bool = False
    """If it fails for good the run goes on without it."""
    is_absent: bool = False
    """Left, or has not come: there is nothing under its number."""
    rests: bool = False
    """Sleeps: it is given neither requests nor weights."""
    is_left_out: bool = False
    """Failed for good, and the run goes on without it: it rests until the end."""
    sampled_tokens: int = 0
    """That it has answered with so far."""
    busy: BusySpans = field(default_factory=lambda: BusySpans("generate"))
    """When it was answering requests."""

    @property
    def is_up(self) -> bool:
        """Return whether it may be given weights: it neither sleeps nor is being started anew."""
        return self.restarting is None and not self.rests

    @property
    def waits_for_weights(self) -> bool:
        """Return whether it is up, and an update is all that it needs."""
        return self.version is None and self.is_up

    async def come_back(self, deadline_s: float) -> None:
        """Start the engine anew, `deadline_s` seconds for each try, unless it is well; it has no weights then.

        Raises:
            EngineError: it has failed more than `FAILURES` times in a row.
        """
        while True:
            with contextlib.suppress(EngineError, WorkerError, DeadlineError):
                await self.handle.health(deadline_s=HEALTH_S)
                return
            try:
                await self.handle.restart(deadline_s)
                return
            except (EngineError, WorkerError, DeadlineError) as error:
                self.failures += 1
                if self.failures > FAILURES:
                    raise EngineError(f"engine {self.number} did not restart in {self.failures} tries: {error}") from error

    @property
    def status(self) -> EngineStatus:
        """Its present activity, as far as the scheduler knows; another thread may ask."""
        return EngineStatus(self.number, self._condition(), self.version, len(self.requests), self.failed_times)

    def _condition(self) -> EngineCondition:
        if self.restarting is not None:
            return "restarting"
        if self.failures > FAILURES or self.is_left_out:
            return "dead"
        if self.rests:
            return "asleep"
        if self.version is None:
            return "waiting"
        return "up" if self.is_open.is_set() else "updating"

    def count_tokens(self, request: EngineRequest, answers: Sequence[Sequence[SampledTurn]]) -> None:
        """Count the tokens that it sampled for a request."""
        for of_prompt in answers:
            self.sampled_tokens += sum([turn.tokens for turn in of_prompt])
        for begun in request.begun or ():
            self.sampled_tokens -= sum(turn.tokens for turn in begun if turn is not None)

    async def wait_until_open(self, deadline_s: float) -> None:
        """Wait while an update keeps requests out."""
        try:
            async with asyncio.timeout(deadline_s):  # unlike wait_for in Python 3.11 it never swallows a cancellation
                await self.is_open.wait()
        except TimeoutError:
            raise DeadlineError(f"engine {self.number} was not open for requests again within {deadline_s:.0f} s") from None

    async def end_conversations(self, names: Sequence[str]) -> None:
        """Tell the engine, if it keeps anything for them; one that failed has forgotten them."""
        if self.keeps_turns:
            with contextlib.suppress(EngineError, WorkerError, DeadlineError):
                await self.handle.end_conversations(names, deadline_s=END_S)


@dataclass(eq=False, slots=True)
class PromptRequest:
    """Prompts that go to one engine together, and whose groups they are, by number (None: no longer wanted)."""

    prompts: list[Prompt]
    generate_groups: GenerateGroups
    groups: int
    """As how many groups it counts."""
    numbers: list[int | None] = field(default_factory=list)
    answer: PendingResult | None = None
    """Who asked for it, where it is no group's."""
    n: int | None = None
    """Responses to each prompt; None: those of a group."""
    failures: int = 0
    partial: list[PartialGroup] | None = None
    """Parts of each group that are there."""
    asked: AskedGroups | None = None
    """While an engine works on it."""
    responses: int = 0
    left: int = 0
    """Responses that count for it there: those that have not ended."""
    prompt_tokens: int = 0


@dataclass(eq=False, slots=True)
class AskedGroups:
    """Groups as they are asked of one engine. `partial`: what there is of each; None: nothing is kept of them."""

    engine: EngineState
    prompts: Sequence[Prompt]
    partial: Sequence[PartialGroup] | None = None
    is_cut: bool = False
    under_way: dict[int, EngineRequest] = field(default_factory=dict)
    """Requests that the engine works on now, by `id`."""
    count_ended: Callable[[int], None] = lambda responses: None
    """Is told how many responses have ended of groups that go on."""
    observe: Callable[..., None] | None = None
    """Is told what an engine has answered to a request."""

    async def generate(
        self, request: EngineRequest, *, names: Sequence[Sequence[str]], groups: Sequence[int]
    ) -> list[list[SampledTurn]]:
        """`Engine.generate` under the engine's next open moment; what was sampled before is not asked for again.

        `names` `[prompt][sample]` are the turns (`turn_name`), and `groups` the places of the prompts' groups. Responses that
        end with `abort` are gone on with; but where these groups were cut it never returns: what there is has been kept, and
        whoever waits is cancelled.
        """
        engine, partial, counted = self.engine, self.partial, 0
        begun: Begun = ()
        while True:
            if partial is not None:
                begun = [[*map(of.turn, turns)] for of, turns in zip(map(partial.__getitem__, groups), names, strict=True)]
                whole = [
                    [turn for turn in of_group if turn is not None and turn.finish_reason != "abort"] for of_group in begun
                ]
                if all(len(of_group) == len(of_prompt) for of_group, of_prompt in zip(whole, names, strict=True)):
                    return whole
                if request.n > 1 and not counted:
                    self.count_ended(counted := sum(map(len, whole)))
            if not engine.is_open.is_set():
                await engine.wait_until_open(request.deadline_s)
            if self.is_cut:
                await asyncio.get_running_loop().create_future()
            if begun and any(turn is not None for of_group in begun for turn in of_group):
                request = replace(request, begun=begun)
            self.under_way[id(request)] = request
            try:
                with engine.busy:
                    answers = await engine.handle.generate(request)
            finally:
                del self.under_way[id(request)]
            engine.count_tokens(request, answers)
            if self.observe is not None:
                self.observe([*map(self.prompts.__getitem__, groups)], request, answers)
            if partial is None:
                return answers
            for group, of_group, of_prompt in zip(groups, names, answers, strict=True):
                for name, answer in zip(of_group, of_prompt, strict=True):
                    partial[group].keep(name, answer)

    @property
    def keys_under_way(self) -> list[str]:
        """Keys of the prompts that the engine works on now."""
        return [key for request in self.under_way.values() for key in request.keys or ()]


def prompt_key(prompt: Prompt) -> str:
    """The key by which engines are asked for a prompt."""
    return prompt.group_id or prompt.row_id
