"""What a run's metrics must not do, as the user writes it: `rollback if kl/reference above 0.5 for 3 steps`.

Pure values; the ranks judge `skip` before an optimizer step, the driver judges the others after a training step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from megarl.errors import ConfigError, nearest

Action = Literal["skip", "rollback", "stop"]
ACTIONS: tuple[Action, ...] = ("skip", "rollback", "stop")
_FORM = re.compile(r"(?P<action>\S+) if (?P<metric>\S+) (?P<side>above|below) (?P<bound>\S+)(?: for (?P<steps>\d+) steps?)?")
_EXAMPLE = "'stop if kl/reference above 0.5 for 3 steps'"


@dataclass(frozen=True)
class GuardRule:
    """`action` is due where `metric` was beyond `bound` on `side` in `steps` steps in a row, or was no number."""

    action: Action
    metric: str
    side: Literal["above", "below"]
    bound: float
    steps: int = 1

    def is_broken_by(self, value: float) -> bool:
        """Whether `value` is beyond the bound; what is not a number is."""
        if math.isnan(value):
            return True
        return value > self.bound if self.side == "above" else value < self.bound

    def __str__(self) -> str:
        during = f" for {self.steps} steps" if self.steps > 1 else ""
        return f"{self.action} if {self.metric} {self.side} {self.bound:g}{during}"


def parse_guards(texts: Sequence[str]) -> tuple[GuardRule, ...]:
    """The rules in `run.guards`.

    Raises:
        ConfigError: an entry has another form, an unknown action, or a bound that is no number.
    """
    return tuple(_parse(f"run.guards[{number}]", text) for number, text in enumerate(texts))


def judge(rules: Sequence[GuardRule], metrics: Mapping[str, float]) -> GuardRule | None:
    """The first of `rules` that a metric breaks, whatever its `steps`; metrics that are not there break none."""
    return next((rule for rule in rules if rule.metric in metrics and rule.is_broken_by(metrics[rule.metric])), None)


def _parse(field: str, text: str) -> GuardRule:
    form = _FORM.fullmatch(" ".join(text.split()))
    if form is None:
        raise ConfigError(
            f"{field} is '{text}', but it may be '<skip|rollback|stop> if <metric> <above|below> <number>', with "
            f"'for <n> steps' at its end or not, such as {_EXAMPLE}"
        )
    action, steps = form["action"], int(form["steps"] or 1)
    if action not in ACTIONS:
        raise ConfigError(f"{field} says '{action}', but it may say {', '.join(ACTIONS)}{nearest(action, ACTIONS)}")
    try:
        bound = float(form["bound"])
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise ConfigError(f"{field} has the bound '{form['bound']}', but it may be a number, such as in {_EXAMPLE}")
    if steps < 1 or (action == "skip" and steps > 1):
        what = "an update is skipped at once" if action == "skip" else "a rule needs at least one step"
        raise ConfigError(f"{field} says 'for {steps} steps', but {what}; leave it out")
    side = cast(Literal["above", "below"], form["side"])
    return GuardRule(cast(Action, action), form["metric"], side, bound, steps)
