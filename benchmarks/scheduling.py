"""What the rollout scheduler costs, and what its schedules reach, by itself: the engines are stand-ins, and time is virtual.

    python benchmarks/scheduling.py --out benchmarks/results/scheduling.json --page docs/evidence/rollouts.md

With `--parts`, only these are measured; what `--out` has of the others stays. `--page` writes the tables into a page.

megarl's own `Scheduler` and `StalenessManager` run in an event loop whose clock jumps from one event to the next. An engine
samples at most `SLOTS` responses side by side, each of them a token every 12 ms x (1 + n / 110) while n are under way. The
lengths of responses are lognormal and end at a limit. A step trains for as long as engines that are always full would take to
sample it, and every update stops all engines for `SYNC_S`. So no step can be shorter than both together, which is the bound.

`cpu` has the CPU seconds of one step of `sync` mode by numbers of engines and groups of one response, and how many of them the
stand-ins and the event loop take without a scheduler (`without_s`); what imports made is left out of garbage collections.
`schedules` the seconds of a step by schedule, as a share of the bound; `over_sampling` those of `sync` mode.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import json
import math
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import numpy as np
from measured_code import code_of
from pages import put_into
from workload import ROOT, machine, publish, versions

sys.path.insert(0, str(ROOT))

from megarl.core.staleness_manager import StalenessManager
from megarl.data.sample import Prompt, Sample
from megarl.rollout.engines.capacity import EndedResponses, EngineCapacity
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.scheduling.engine_state import AskedGroups, GenerateGroups, prompt_key
from megarl.rollout.scheduling.partial_groups import turn_names
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.system.garbage import collect_rarely

T = TypeVar("T")
ENGINES, SLOTS, GROUPS, SAMPLES, SYNC_S = 16, 64, 128, 8, 3.0
LENGTHS = {"32k": (8192, 0.9, 32768)}
"""Mean and sigma of the lognormal, and the limit."""
STEPS, FIRST, SEEDS = 44, 8, 2
"""Steps of a run, how many at its start are left out, and runs."""
STALENESS, MORE = (1, 2, 4, 8), (0, 16, 32, 48, 64, 128)
SIZES = ((128, 1024), (128, 8192), (1280, 8192), (128, 65536), (1280, 65536))
"""Engines and groups of one response."""
ROUNDS = 3
"""Times that they are tried; the quickest counts."""
NEVER = 1e12


def token_s(under_way: int) -> float:
    """Seconds in which an engine samples a token of each of so many responses."""
    return 0.012 * (1 + under_way / 110)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: its clock jumps to the next event."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing will ever happen"
            self.now += timeout
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class VirtualThread:
    """A `LoopThread` in virtual time: the loop runs while its caller waits."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.is_open = True

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float = 0.0) -> T:
        """Do `work` in the loop, and return what it returns."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        """Close the loop."""
        self.is_open = False
        self.loop.close()


@dataclass(eq=False)
class Asked:
    """A request to a stand-in: what it is to answer with, and how many tokens of each response are missing."""

    request: EngineRequest
    answer: asyncio.Future[list[list[Generation]]]
    left: int
    lengths: list[int]
    had: list[int]


@dataclass(eq=False)
class PacedEngine:
    """Samples `SLOTS` responses side by side, the others wait; `lengths[row][sample]` are those of the responses."""

    loop: VirtualLoop
    lengths: Any
    under_way: list[tuple[float, int, Asked, int]] = field(default_factory=list)
    """(token count at its end, order, request, sample) as a heap."""
    waiting: deque[tuple[int, Asked, int]] = field(default_factory=deque)
    tokens: float = 0.0
    """Sampled since the start by a response that was always under way."""
    since: float = 0.0
    is_paused: bool = False
    order: int = 0
    timer: asyncio.TimerHandle | None = None
    ended: EndedResponses = field(default_factory=EndedResponses)

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        [key], [prompt] = request.keys or (), request.prompts
        lengths = self.lengths[prompt[0]]
        begun = request.begun[0] if request.begun is not None else [None] * request.n
        had = [len(turn.response_ids) if turn is not None else 0 for turn in begun]
        asked = Asked(request, self.loop.create_future(), request.n, lengths, had)
        self._advance()
        for sample in range(request.n):
            if had[sample] < lengths[sample]:
                self.waiting.append((lengths[sample] - had[sample], asked, sample))
            else:
                asked.left -= 1
        self._fill()
        try:
            return await asked.answer
        finally:
            self.ended.forget([key])
            if asked.left:
                self._remove(asked)

    async def cut(self, keys: Sequence[str], *, deadline_s: float) -> None:
        self._advance()
        chosen = {*keys}
        cut = {asked for *_, asked, _ in [*self.under_way, *self.waiting] if chosen.intersection(asked.request.keys or ())}
        for asked in cut:
            left = {sample: length for length, of, sample in self.waiting if of is asked}
            left |= {sample: end - self.tokens for end, _, of, sample in self.under_way if of is asked}
            self._remove(asked)
            self._answer(asked, {sample: math.ceil(tokens) for sample, tokens in left.items()})

    async def capacity(self, *, deadline_s: float) -> EngineCapacity:
        return EngineCapacity(SLOTS)

    async def take_ended(self, *, deadline_s: float) -> list[str]:
        return await self.ended.take()

    def pause(self, *, paused: bool) -> None:
        """Stop sampling, or go on."""
        self._advance()
        self.is_paused = paused
        self._set_timer()

    def _advance(self) -> None:
        if self.under_way and not self.is_paused:
            self.tokens += (self.loop.now - self.since) / token_s(len(self.under_way))
        self.since = self.loop.now

    def _fill(self) -> None:
        while self.waiting and len(self.under_way) < SLOTS:
            length, asked, sample = self.waiting.popleft()
            self.order += 1
            heapq.heappush(self.under_way, (self.tokens + length, self.order, asked, sample))
        self._set_timer()

    def _set_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.under_way and not self.is_paused:
            seconds = max(0.0, self.under_way[0][0] - self.tokens) * token_s(len(self.under_way))
            self.timer = self.loop.call_at(self.loop.now + seconds, self._end)

    def _end(self) -> None:
        self._advance()
        while self.under_way and self.under_way[0][0] <= self.tokens + 1e-6:
            *_, asked, _ = heapq.heappop(self.under_way)
            asked.left -= 1
            if asked.left:
                self.ended.note((asked.request.keys or ("",))[0])
            else:
                self._answer(asked, {})
        self._fill()

    def _answer(self, asked: Asked, left: dict[int, int]) -> None:
        answer = []
        for sample, length in enumerate(asked.lengths):
            ids: Any = range(length - left.get(sample, 0))  # nobody reads the tokens
            answer.append(Generation(ids, ids, ids, "abort" if sample in left else "stop"))
        if not asked.answer.done():
            asked.left = 0
            asked.answer.set_result([answer])

    def _remove(self, asked: Asked) -> None:
        self._advance()
        self.under_way = [one for one in self.under_way if one[2] is not asked]
        heapq.heapify(self.under_way)
        self.waiting = deque(one for one in self.waiting if one[1] is not asked)
        self._fill()


class InstantEngine:
    """Answers after a while, whatever else it is asked."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths
        self.answer = [[Generation([1], [0.0], [0], "stop")]]

    async def generate(self, request: EngineRequest) -> list[list[Generation]]:
        await asyncio.sleep(self.lengths[request.prompts[0][0]][0])
        return self.answer


def responses(n: int) -> GenerateGroups:
    """`n` responses to each prompt, as `single_turns` asks for them; no samples are made of them."""
    params = SamplingParams(max_new_tokens=1 << 20)

    async def generate_groups(groups: AskedGroups) -> list[list[Sample]]:
        ids = [prompt.prompt_ids for prompt in groups.prompts]
        request = EngineRequest(ids, params, n=n, keys=[prompt_key(prompt) for prompt in groups.prompts], deadline_s=NEVER)
        names = [turn_names(n, of_prompt) for of_prompt in ids] if groups.partial is not None else []
        await groups.generate(request, names=names, groups=range(len(ids)))
        return [[] for _ in ids]

    return generate_groups


class Prompts:
    """Prompts without end, numbered from 0."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, count: int) -> list[Prompt]:
        self.given += count
        return [Prompt(f"r{i}", f"g{i}", [i], "") for i in range(self.given - count, self.given)]


@dataclass(frozen=True)
class Schedule:
    """A schedule of a run; `by_share`: engines get their share of a step and no more, as before 2026-11-28."""

    mode: str
    staleness: int = 0
    over_sample: int = 0
    continues: bool = False
    by_share: bool = False


class VirtualRun:
    """A run of `steps` steps in virtual time."""

    def __init__(self, schedule: Schedule, lengths: tuple[float, float, int], steps: int, seed: int) -> None:
        self.schedule = schedule
        average, sigma, limit = lengths
        luck = np.random.default_rng(seed)
        rows = GROUPS * (steps + schedule.staleness + 4) + 2 * schedule.over_sample
        drawn = np.exp(math.log(average) - sigma**2 / 2 + sigma * luck.standard_normal((rows, SAMPLES)))
        table = np.clip(drawn, 1, limit).astype(int)
        self.train_s = float(table.mean()) * token_s(SLOTS) * GROUPS * SAMPLES / (ENGINES * SLOTS)
        self.bound_s = self.train_s + SYNC_S
        thread = VirtualThread()
        self.engines = [PacedEngine(thread.loop, table.tolist()) for _ in range(ENGINES)]
        manager = StalenessManager(GROUPS, schedule.staleness, schedule.over_sample, continues=schedule.continues)
        share = -(-(GROUPS + schedule.over_sample) // ENGINES)
        self.scheduler = Scheduler(
            self.engines,  # type: ignore[arg-type]
            manager,
            responses(SAMPLES),
            groups_per_engine=share if schedule.by_share else SLOTS * SAMPLES,
            samples_per_group=SAMPLES,
            reports=not schedule.by_share,
            cuts=schedule.continues,
            thread=thread,  # type: ignore[arg-type]
        )
        thread.run(self.scheduler.order.ask_capacities())

    def step_s(self, steps: int) -> float:
        """The mean seconds of a step."""
        scheduler, prompts, taken_at = self.scheduler, Prompts(), list[float]()
        scheduler.resume(range(ENGINES), 0)
        for version in range(steps):
            if version:
                self._finish_step_ahead(version, prompts)
                self._update(version)
            scheduler.open_step(version, prompts)
            assert scheduler.wait(NEVER)
            scheduler.pop_batch()
            taken_at.append(scheduler.thread.loop.time())
            scheduler.thread.run(asyncio.sleep(self.train_s))
        scheduler.close()
        first = min(FIRST, steps // 2)
        return (taken_at[-1] - taken_at[first]) / (steps - 1 - first)

    def _finish_step_ahead(self, version: int, prompts: Prompts) -> None:
        if self.schedule.mode == "one_step_off_policy":
            self.scheduler.open_step(version, prompts)
            assert self.scheduler.wait(NEVER)
            self.scheduler.stop_all()

    def _update(self, version: int) -> None:
        self.scheduler.hold(range(ENGINES))
        for engine in self.engines:
            engine.pause(paused=True)
        self.scheduler.thread.run(asyncio.sleep(SYNC_S))
        for engine in self.engines:
            engine.pause(paused=False)
        self.scheduler.resume(range(ENGINES), version)


def measured(schedule: Schedule, lengths: str) -> dict[str, float]:
    """A schedule's seconds per step, and the share of the bound that it reaches; means over seeds."""
    runs = [VirtualRun(schedule, LENGTHS[lengths], STEPS, seed) for seed in range(SEEDS)]
    steps = [run.step_s(STEPS) for run in runs]
    return {
        "step_s": mean(steps),
        "bound_s": mean(run.bound_s for run in runs),
        "of_bound": mean(run.bound_s / step for run, step in zip(runs, steps, strict=True)),
        "of_generation_alone": mean(run.train_s / step for run, step in zip(runs, steps, strict=True)),
    }


def schedules(lengths: str) -> dict[str, dict[str, float]]:
    """The share of the bound by schedule."""
    tried = {"sync": Schedule("sync"), "one_step_off_policy": Schedule("one_step_off_policy", 1)}
    tried |= {f"async, staleness {eta}": Schedule("async", eta) for eta in STALENESS}
    tried |= {f"async, staleness {eta}, by share": Schedule("async", eta, by_share=True) for eta in STALENESS}
    return {name: measured(schedule, lengths) for name, schedule in tried.items()}


def over_sampling(lengths: str) -> dict[str, dict[str, float]]:
    """A step of `sync` mode by how many groups more are started, beside one without."""
    plain = measured(Schedule("sync"), lengths)["step_s"]
    found = {}
    for more in filter(None, MORE):
        for name, continues in (("restart", False), ("continue", True)):
            step = measured(Schedule("sync", 0, more, continues), lengths)["step_s"]
            found[f"{more} of {GROUPS} more, {name}"] = {"step_s": step, "change": step / plain - 1}
    return found


def cpu_seconds(engines: int, groups: int) -> dict[str, float]:
    """CPU seconds of a step of `sync` mode with groups of one response, from its prompts to its batch."""
    luck = np.random.default_rng(0)
    lengths, thread, prompts = luck.uniform(10, 100, (2 * groups, 1)).tolist(), VirtualThread(), Prompts()
    handles: Any = [InstantEngine(lengths) for _ in range(engines)]
    gc.collect()
    collect_rarely()  # as `megarl train` does
    begun = time.process_time()
    params = SamplingParams(1)
    requests = [EngineRequest([[number]], params, keys=[f"g{number}"]) for number in range(groups)]
    thread.run(_ask_all(handles, requests))
    without_s = time.process_time() - begun
    del requests
    scheduler = Scheduler(handles, StalenessManager(groups, 0), responses(1), groups_per_engine=SLOTS, thread=thread)  # type: ignore[arg-type]
    scheduler.resume(range(engines), 0)
    given = prompts(groups)
    begun = time.process_time()
    scheduler.open_step(0, lambda count: given)
    assert scheduler.wait(NEVER)
    scheduler.pop_batch()
    seconds = time.process_time() - begun
    scheduler.close()
    gc.unfreeze()
    return {"cpu_s": seconds, "without_s": without_s, "scheduler_s": seconds - without_s}


async def _ask_all(handles: Sequence[InstantEngine], requests: Sequence[EngineRequest]) -> None:
    asked = (handles[number % len(handles)].generate(request) for number, request in enumerate(requests))
    await asyncio.gather(*map(asyncio.ensure_future, asked))


def tables(found: dict[str, Any]) -> str:
    """The figures as they stand on a page."""
    lines = ["| engines, groups | CPU seconds of a step | of them the scheduler's |", "|---|---|---|"]
    lines += [f"| {name} | {row['cpu_s']:.2f} | {row['scheduler_s']:.2f} |" for name, row in found["cpu"].items()]
    for lengths, rows in found["schedules"].items():
        lines += [
            "",
            f"| schedule, responses to {lengths} | seconds of a step | of the bound | by share |",
            "|---|---|---|---|",
        ]
        for name, row in rows.items():
            if not name.endswith("by share"):
                before = rows.get(f"{name}, by share")
                by_share = f"{before['of_bound']:.2f}" if before is not None else ""
                lines.append(f"| {name} | {row['step_s']:,.0f} | {row['of_bound']:.2f} | {by_share} |")
    for lengths, rows in found["over_sampling"].items():
        lines += ["", f"| `sync`, over-sampling, responses to {lengths} | seconds of a step | change |", "|---|---|---|"]
        lines += [f"| {name} | {row['step_s']:,.0f} | {row['change']:+.0%} |" for name, row in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--parts", nargs="*", default=["cpu", "schedules", "over_sampling"])
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out is not None and options.out.exists() else {}
    found |= {
        "command": "python benchmarks/scheduling.py",
        "machine": machine(),
        "code": code_of("scheduling"),
        "versions": versions(),
        "setup": {
            "engines": ENGINES, "responses at once": SLOTS, "groups": GROUPS, "samples": SAMPLES, "sync_s": SYNC_S,
            "token_s": "0.012 x (1 + n / 110)", "lengths": LENGTHS, "steps": STEPS, "seeds": SEEDS,
        },
    }  # fmt: skip
    if "cpu" in options.parts:
        found["cpu"] = {
            f"{engines:,} engines, {groups:,} groups": min(
                (cpu_seconds(engines, groups) for _ in range(ROUNDS)), key=lambda row: row["cpu_s"]
            )
            for engines, groups in SIZES
        }
    if "schedules" in options.parts:
        found["schedules"] = {lengths: schedules(lengths) for lengths in LENGTHS}
    if "over_sampling" in options.parts:
        found["over_sampling"] = {lengths: over_sampling(lengths) for lengths in LENGTHS}
    publish(found, options.out)
    if options.page is not None:
        put_into(options.page, "scheduling", tables(found))


if __name__ == "__main__":
    main()
