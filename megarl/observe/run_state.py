"""The state of a run at any moment: its last metrics, the phase that is on, and the state of ranks and engines.

The driver writes; threads that watch read. Nothing here waits for the run, and what cannot be found out is left out.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from megarl.config import AnyConfig
from megarl.observe.growing_file import RowFile
from megarl.observe.metrics import numbers
from megarl.observe.record_lines import object_line
from megarl.version import __version__

T = TypeVar("T")
EngineCondition = Literal["up", "updating", "waiting", "asleep", "restarting", "dead"]
"""`up`: serves. `updating`: is being given weights. `waiting`: is well and has no weights yet. `asleep`: is lent, and the
trainer has its GPUs. `restarting`: failed, and is started again. `dead`: failed too often; the run ends unless it is lent."""
ENGINE_CONDITIONS: tuple[EngineCondition, ...] = get_args(EngineCondition)
ENGINE_IS_UP: tuple[EngineCondition, ...] = ("up", "updating", "waiting", "asleep")
RankCondition = Literal["up", "silent", "gone"]
"""`up`: answers. `silent`: has not answered for half a minute. `gone`: its process has ended."""
RANK_CONDITIONS: tuple[RankCondition, ...] = get_args(RankCondition)


@dataclass(frozen=True)
class EngineStatus:
    """One engine. `weight_version`: None while it has no weights that are of use; `requests`: those under way on it."""

    number: int
    condition: EngineCondition
    weight_version: int | None
    requests: int
    failures: int
    """Times that it failed, so far."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than its peers, on `node`: `behind` is the share by which `phase` takes it longer."""

    group: str
    rank: int
    node: str
    phase: str
    behind: float


@dataclass(frozen=True)
class GuardCounts:
    """So far: by role, updates that were not applied; returns to a checkpoint; how often each rule of `run.guards` applied."""

    skipped: Mapping[str, int] = field(default_factory=dict)
    rollbacks: int = 0
    applied: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A run at a moment, `at` in seconds since the epoch as all times here. None and empty: not known (yet)."""

    at: float
    run: str
    version: str
    kind: str
    """`rl` or `supervised`."""
    started_at: float
    """When the process that trains started: anew with every restart."""
    step: int
    steps: int
    progress_at: float
    """When a step was last finished, or the process started, whatever is later."""
    phase: str | None
    phase_since: float
    phases: Sequence[str]
    """All that were on so far."""
    metrics: Mapping[str, float]
    """Those of the last step, and of the last evaluation."""
    engines: Sequence[EngineStatus]
    ranks: Mapping[str, Sequence[RankCondition]]
    guards: GuardCounts
    restarts: int
    checkpoint: tuple[int, float] | None
    """Step of the newest checkpoint, and when it was whole."""
    disk: tuple[int, int] | None
    """Bytes that are free where the run writes, and all."""
    slow_ranks: Sequence[SlowRank] = ()


class RunState:
    """Is told of steps (`log`) and phases (`phase_changed`); asks for the rest: `engines`, `ranks`, `guards`, `checkpoint`."""

    def __init__(self, config: AnyConfig, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch."""
        self._config, self._clock = config, clock
        self._folder = Path(config.run_folder)
        self._started_at = self._progress_at = clock()
        self._phase: tuple[str | None, float] = (None, self._started_at)
        self._phases: tuple[str, ...] = ()
        self._logged: tuple[int, Mapping[str, float]] = (0, {})
        self.restarts = _restarts(self._folder / "faults.jsonl")
        self.steps = config.run.steps
        self.engines: Callable[[], Sequence[EngineStatus]] = lambda: ()
        self.ranks: Mapping[str, Callable[[], Sequence[RankCondition]]] = {}
        self.guards: Callable[[], GuardCounts] = GuardCounts
        self.slow_ranks: Callable[[], Sequence[SlowRank]] = lambda: ()
        self.checkpoint: Callable[[], Path | None] = lambda: None
        self.say: Callable[[str], None] = lambda line: None
        self._unknown = set[str]()

    def begin_after(self, step: int) -> None:
        """The run continues from a checkpoint of `step`."""
        self._logged = (step, self._logged[1])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`, as a tracker does; those of the last evaluation stay until there is another."""
        last_evaluation = {name: value for name, value in self._logged[1].items() if name.startswith("eval/")}
        self._logged = (step, last_evaluation | numbers(metrics))
        if step:
            self._progress_at = self._clock()

    def close(self) -> None:
        """Nothing is buffered."""

    def phase_changed(self, name: str | None) -> None:
        """The driver is now in phase `name` (None: in none); give this to `Phases.listen`."""
        self._phase = (name, self._clock())
        if name is not None and name not in self._phases:
            self._phases = (*self._phases, name)

    def snapshot(self) -> Snapshot:
        """The run as it is now."""
        (step, metrics), (phase, since) = self._logged, self._phase
        unknown: Sequence[RankCondition] = ()
        return Snapshot(
            at=self._clock(),
            run=self._config.run.name,
            version=__version__,
            kind=self._config.trainer,
            started_at=self._started_at,
            step=step,
            steps=self.steps,
            progress_at=self._progress_at,
            phase=phase,
            phase_since=since,
            phases=self._phases,
            metrics=metrics,
            engines=self._ask("engines", self.engines, ()),
            ranks={name: states for name, ask in self.ranks.items() if (states := self._ask(name, ask, unknown))},
            guards=self._ask("guards", self.guards, GuardCounts()),
            restarts=self.restarts,
            checkpoint=self._ask("checkpoint", lambda: _checkpoint(self.checkpoint()), None),
            disk=self._ask("disk", lambda: _disk(self._folder), None),
            slow_ranks=self._ask("slow ranks", self.slow_ranks, ()),
        )

    def _ask(self, what: str, supplier: Callable[[], T], instead: T) -> T:
        """Ask `supplier`; a failure is said once, and never reaches the run."""
        try:
            return supplier()
        except Exception as error:  # noqa: BLE001 - whoever watches must not end what is watched
            if what not in self._unknown:
                self._unknown.add(what)
                self.say(f"the state of {what} cannot be told to who watches: {type(error).__name__}: {error}")
            return instead


def _checkpoint(path: Path | None) -> tuple[int, float] | None:
    """Step and time of a checkpoint's folder; None if another process has just removed it."""
    try:
        return (int(path.name.removeprefix("step_")), path.stat().st_mtime) if path is not None else None
    except FileNotFoundError:
        return None


def _disk(folder: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(folder)
    return usage.free, usage.total


def _restarts(faults: Path) -> int:
    """Failures in the run's `faults.jsonl` that another attempt followed; a line that is none is left out."""
    return sum(isinstance(fault.get("wait_s"), float | int) for fault in RowFile(faults, object_line).rows)
