"""Display for the user while a run goes on: a line per step, below it a live view on a terminal, a table at the end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.errors import counted
from megarl.observe.phases import Phases
from megarl.system.redaction import redacted
from megarl.system.safe_console import SafeConsole

TOWER = {"tower": "policy/tower_flops_share"}
"""Shown of steps whose prompts show pictures: the vision tower's share of the operations of updates."""
SHOWN = {
    "reward": "reward/mean",
    "reward errors": "reward/errors",
    "KL": "kl/reference",
    "critic explains": "critic/explained_variance",
    "length": "response/tokens_mean",
    "staleness": "staleness/mean",
    "acceptance": "rollout/acceptance_length",
    "tokens/s": "speed/tokens_per_s",
    **TOWER,
    "GiB": "memory/policy_peak_gib",
}
"""Label and metric name of what every step shows; a metric that a step lacks is left out."""
BAR_WIDTH = 24
REFRESHES_PER_S = 4
TOLD_PHASES = ("evaluate",)
"""Phases that may last long, and whose end would be the first line that says anything of them."""
STEPS_AVERAGED = 10
"""Last steps that the time left is reckoned from."""

PhaseProgress = Callable[[], tuple[int, int]]
"""How far a phase is: what is done, and how much there is to do (0: not known)."""


def evaluation_line(figures: Mapping[str, float]) -> str:
    """The figures of an evaluation in one line, set by set, with standard errors and the number of prompts."""
    sets: dict[str, list[str]] = {}
    for path, value in figures.items():
        of, _, name = path.rpartition("/")
        if name not in ("seconds", "prompts") and not name.endswith("_se"):
            error = figures.get(f"{path}_se")
            sets.setdefault(of, []).append(f"{name} {value:.4g}" + (f" ± {error:.2g}" if error is not None else ""))
    words = []
    for of, shown in sets.items():
        prompts = figures.get(f"{of}/prompts" if of else "prompts")
        how_many = f" ({counted(round(prompts), 'prompt')})" if prompts is not None else ""
        words.append((f"{of}: " if of else "") + ", ".join(shown) + how_many)
    return "; ".join(words)


def gate_line(value: float | None, bound: float | None) -> str:
    """A parity figure, and whether it is sound where that is known."""
    if value is None:
        return "not measured"
    if bound is None:
        return f"{value:.3g}"
    if value <= bound:
        return f"{value:.3g} (ok, at most {bound:g})"
    return f"{value:.3g} (NOT ok, at most {bound:g})\n    see docs/run_that_does_not_learn.md"


def rows_line(train: int, held_out: int | None, limit: int | None, sets: Mapping[str, int]) -> str:
    """Say how many rows a run trains on and is evaluated on; `limit`: of held-out rows, `sets`: rows of `evaluations` by
    name."""
    parts = [counted(train, "training row")]
    if held_out is not None:
        parts.append(counted(held_out, "held-out row") + (f" (data.eval.limit is {limit})" if limit else ""))
    if sets:
        parts.append("evaluations: " + ", ".join(f"{name} {rows}" for name, rows in sets.items()))
    return ", ".join(parts)


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each row, such as the batch arithmetic's, with the second column below itself."""
    width = max(len(what) for what, _ in rows)
    return [f"{what:<{width}}  {how_many}" for what, how_many in rows]


def fitting(parts: Sequence[str], width: int) -> str:
    """One line of at most `width` columns: the first and last of `parts`, and of the others those that there is room for."""
    shown = [*parts[:1], *parts[1:][-1:]]
    for part in parts[1:-1]:
        if len("  ".join([*shown, part])) <= width:
            shown.insert(-1, part)
    return "  ".join(shown)


class Progress:
    """Shows the steps of a run: `with Progress(total, phases) as progress: ... progress.step_done(step, metrics)`."""

    def __init__(
        self,
        total_steps: int,
        phases: Phases,
        *,
        first_step: int = 0,
        shown: Mapping[str, str] = SHOWN,
        console: Console | None = None,
    ) -> None:
        """`first_step` is the number of steps already done when the run was resumed."""
        self._total, self._first, self._phases, self._shown = total_steps, first_step, phases, shown
        self.console = console or SafeConsole()
        self._live: Live | None = None
        self._within: dict[str, tuple[str, PhaseProgress]] = {}
        self._phase: str | None = None
        self._since_s = 0.0
        self._doing: str | None = None
        self._doing_since_s = 0.0
        self._parts: list[tuple[str, float]] = []
        self._done_at_s: deque[float] = deque(maxlen=STEPS_AVERAGED + 1)
        self._done, self._last_line = first_step, ""
        self._shares: dict[str, float] = {}
        self._timer: threading.Timer | None = None
        self.told_every_s = 30.0

    def __enter__(self) -> Progress:
        self._phases.listen(self._phase_changed)
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._view, console=self.console, refresh_per_second=REFRESHES_PER_S, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._phase_changed(None)
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._phases.steps:
            self.console.print(phase_table(self._phases))
        if self._last_line and self.console.is_terminal:  # the table has pushed it up
            self.say(self._last_line)

    def within(self, phase: str, unit: str, progress: PhaseProgress) -> None:
        """While `phase` is on, show how far it is, in `unit`; another thread asks `progress`, several times a second.

        Where there is no terminal, those of `TOLD_PHASES` say it in a line every `told_every_s` seconds.
        """
        self._within[phase] = unit, progress

    def doing(self, what: str | None) -> None:
        """Show, and time until the next call, what the phase that is on waits for from now on (None: nothing)."""
        now = time.monotonic()
        if self._doing is not None:
            self._parts.append((self._doing, now - self._doing_since_s))
        self._doing, self._doing_since_s = what, now

    def say_parts(self, of: str) -> None:
        """Print in one line how long each part took that `doing` told of, or the longest of them, under the name `of`."""
        self.doing(None)
        parts = [part for part in self._parts if part[1] >= 0.05]
        while len(line := f"{of}: " + ", ".join(f"{what} {spent:.1f} s" for what, spent in parts)) > 80:
            parts.remove(min(parts, key=lambda part: part[1]))
        if parts:
            self.say(line)
        self._parts = []

    def say(self, text: str) -> None:
        """Print a line above the view. On a terminal a long one goes on below, at a word; elsewhere lines stay whole."""
        self.console.print(redacted(text), markup=False, highlight=False, soft_wrap=not self.console.is_terminal)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` (counted from 1) is done."""
        digits = 3 if self.console.is_terminal else 4
        parts = [f"{label} {_short(metrics[name], digits)}" for label, name in self._shown.items() if name in metrics]
        times = self._phases.last_step
        parts += [f"{times.wall_s:.1f} s"] if times is not None else []
        self._done = step
        self._done_at_s.append(time.monotonic())
        self._shares = {name: total["share"] for name, total in self._phases.totals().items()}
        parts.insert(0, f"step {step}/{self._total}")
        if self.console.is_terminal:  # a line wraps nowhere; metrics.jsonl has what it leaves out
            self._last_line = f"last {fitting(parts, self.console.width - len('last '))}"
            self.say(fitting(parts, self.console.width))
            return
        parts.append(f"left {duration(self._left_s(step))}")
        longest = sorted(times.phase_s.items(), key=lambda item: -item[1])[:3] if times is not None and times.wall_s else []
        shares = ", ".join(f"{name} {spent / times.wall_s:.0%}" for name, spent in longest) if times else ""
        self.say("  ".join(parts) + (f"  ({shares})" if shares else ""))

    def _left_s(self, step: int) -> float:
        """Estimate the seconds left by the last steps' time, with what came between them such as saves and evaluations."""
        times, last = self._done_at_s, self._phases.last_step
        of_one = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else last.wall_s if last is not None else 0.0
        return of_one * (self._total - step)

    def _phase_changed(self, name: str | None) -> None:
        self._phase, self._since_s = name, time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
        self._tell_later(name)

    def _tell_later(self, name: str | None) -> None:
        self._timer = None
        if name in TOLD_PHASES and name in self._within and not self.console.is_terminal and not self.console.quiet:
            self._timer = threading.Timer(self.told_every_s, self._tell, [name, self._since_s])
            self._timer.daemon = True
            self._timer.start()

    def _tell(self, name: str, since_s: float) -> None:
        unit, progress = self._within[name]
        done, total = progress()
        if (self._phase, self._since_s) == (name, since_s):
            self.say(f"{name}: {done}/{total} {unit}, {duration(time.monotonic() - since_s)}")
            self._tell_later(name)

    def _view(self) -> Table:
        """The steps, the phase that is on, and where the time of all steps went."""
        rows = Table.grid(padding=(0, 1))
        left = f"left {duration(self._left_s(self._done))}" if self._done > self._first else ""
        rows.add_row("steps", _bar(self._done, self._total), f"{self._done}/{self._total}  {left}")
        phase = self._phase
        unit, progress = self._within.get(phase or "", ("", None))
        done, total = progress() if progress is not None else (0, 0)
        spent = f"{time.monotonic() - self._since_s:.1f} s" if phase is not None else ""
        spent += f"  {self._doing}" if phase is not None and self._doing is not None else ""
        rows.add_row(phase or "", _bar(done, total), f"{done}/{total} {unit}  {spent}" if total else spent)
        for name, share in self._shares.items():
            if name != phase and share >= 0.01:
                rows.add_row(Text(name, style="dim"), "", Text(f"{share:.0%} of the steps' time", style="dim"))
        return rows


def _bar(done: int, wanted: int) -> ProgressBar | str:
    return ProgressBar(total=wanted, completed=done, width=BAR_WIDTH) if wanted else ""


def phase_table(phases: Phases) -> Table:
    """Seconds, seconds per step and share of every phase of the finished steps, then the phases outside steps."""
    table = Table(title=f"Where the time went ({counted(phases.steps, 'step')})", title_justify="left")
    table.add_column("phase")
    for column in ("seconds", "per step", "share"):
        table.add_column(column, justify="right")
    for name, spent in phases.totals().items():
        seconds = spent["seconds"]
        table.add_row(name, f"{seconds:.1f}", f"{seconds / max(1, phases.steps):.2f}", f"{spent['share']:.1%}")
    if phases.outside():
        table.add_section()
        for name, spent in phases.outside().items():
            table.add_row(f"{name} (outside steps)", f"{spent['seconds']:.1f}", "", "")
    return table


def duration(seconds: float) -> str:
    """`45 s`, `12 min 05 s` or `3 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _short(value: float, digits: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"
