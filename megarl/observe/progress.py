"""What the user sees while a run goes on: bars on a terminal, one plain line per step elsewhere, the phase table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from megarl.observe.phases import Phases

SHOWN = {"reward": "reward/mean", "KL": "kl/reference", "tokens/s": "speed/tokens_per_s"}
"""Label and metric name of what every step shows; a metric that a step lacks is left out."""


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
        self.console = console or Console()
        self._bars: Bars | None = None
        self._step_bar: TaskID | None = None
        self._phase_bars: dict[str, TaskID] = {}
        self._started_s = 0.0

    def __enter__(self) -> Progress:
        self._started_s = time.monotonic()
        if self.console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description:<12}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self._step_bar = self._bars.add_task("step", total=self._total, completed=self._first, text="")
            self._bars.start()
            self._phases.listen(self._phase_changed)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        if self._phases.steps:
            self.console.print(phase_table(self._phases))

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` (counted from 1) is done."""
        parts = [f"{label} {_short(metrics[name])}" for label, name in self._shown.items() if name in metrics]
        times = self._phases.last_step
        if times is not None:
            parts.append(f"{times.wall_s:.1f} s")
        parts.append(f"left {duration(self._left_s(step))}")
        if self._bars is not None and self._step_bar is not None:
            self._bars.update(self._step_bar, completed=step, text=" · ".join([f"{step}/{self._total}", *parts]))
            self._show_shares()
            return
        longest = sorted(times.phase_s.items(), key=lambda item: -item[1])[:3] if times is not None and times.wall_s else []
        shares = ", ".join(f"{name} {spent / times.wall_s:.0%}" for name, spent in longest) if times else ""
        self.say(f"step {step}/{self._total}  " + "  ".join(parts) + (f"  ({shares})" if shares else ""))

    def _left_s(self, step: int) -> float:
        done = max(1, step - self._first)
        return (time.monotonic() - self._started_s) / done * (self._total - step)

    def _phase_changed(self, name: str | None) -> None:
        if self._bars is None:
            return
        if name is not None and name not in self._phase_bars:
            self._phase_bars[name] = self._bars.add_task(f"  {name}", total=100, text="")
        for other, bar in self._phase_bars.items():
            self._bars.update(bar, description=f"{'>' if other == name else ' '} {other}")

    def _show_shares(self) -> None:
        if self._bars is None:
            return
        for name, spent in self._phases.totals().items():
            if name in self._phase_bars:
                text = f"{spent['share']:.0%} · {spent['seconds']:.1f} s in all"
                self._bars.update(self._phase_bars[name], completed=100 * spent["share"], text=text)


def phase_table(phases: Phases) -> Table:
    """Seconds, seconds per step and share of every phase of the finished steps, then the phases outside steps."""
    table = Table(title=f"Where the time went ({phases.steps} steps)", title_justify="left")
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


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
