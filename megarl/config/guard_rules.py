"""Limits of a run's metrics, as the user writes it in `run.guards`.

Pure values; the ranks judge `skip` before an optimizer step, the driver judges the others after a training step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarl.config.section import Positive, Section
from megarl.errors import ConfigError

Action = Literal["skip", "rollback", "stop"]


class GuardConfig(Section):
    """A limit of one metric, and what happens when the metric is beyond it. A metric that is not a number is beyond it."""

    metric: str
    """Name of the metric as in `metrics.jsonl`, e.g. `kl/reference`."""
    above: float | None = None
    """Act when the metric is above this number. Each guard has either `above` or `below`."""
    below: float | None = None
    """Act when the metric is below this number."""
    action: Action
    """`skip`: do not apply the update. `rollback`: return to the weights of an earlier checkpoint. `stop`: end the run."""
    for_steps: Positive = 1
    """Act after this many steps in a row."""


@dataclass(frozen=True)
class GuardRule:
    """`action` is due where `metric` was beyond `bound` on `side` in `steps` steps in a row, or was no number."""

    action: Action
    metric: str
    side: Literal["above", "below"]
    bound: float
    steps: int = 1

    def is_broken_by(self, value: float) -> bool:
        """Return whether `value` is beyond the bound; what is not a number is."""
        if math.isnan(value):
            return True
        return value > self.bound if self.side == "above" else value < self.bound

    def __str__(self) -> str:
        during = f" for {self.steps} steps" if self.steps > 1 else ""
        return f"{self.action} if {self.metric} {self.side} {self.bound:g}{during}"


def parse_guards(guards: Sequence[GuardConfig]) -> tuple[GuardRule, ...]:
    """The rules of `run.guards`.

    Raises:
        ConfigError: an entry has no bound or two, or an update would be skipped only after several steps.
    """
    return tuple(_rule(f"run.guards[{number}]", guard) for number, guard in enumerate(guards))


def skip_rules(guards: Sequence[GuardConfig], role: str, prefix: str, others: Sequence[str] = ()) -> tuple[GuardRule, ...]:
    """The rules that the ranks of `role` judge, under the names that metrics have there.

    Args:
        guards: `run.guards`.
        role: in whose updates they are judged.
        prefix: what the run puts before the names of the role's own metrics (`policy/grad_norm` is `grad_norm` there).
        others: prefixes of metrics of other roles.
    """
    rules = [rule for rule in parse_guards(guards) if rule.action == "skip"]
    role_rules = [rule for rule in rules if rule.metric.partition("/")[0] not in others]
    role_names = {f"{prefix}/grad_norm": "grad_norm"}
    if prefix != role:  # a run on given responses names all its metrics train/…
        role_names |= {rule.metric: rule.metric.removeprefix(f"{prefix}/") for rule in role_rules}
    return tuple(replace(rule, metric=role_names.get(rule.metric, rule.metric)) for rule in role_rules)


def judge(rules: Sequence[GuardRule], metrics: Mapping[str, float]) -> GuardRule | None:
    """The first of `rules` that a metric breaks, whatever its `steps`; metrics that are not there break none."""
    return next((rule for rule in rules if rule.metric in metrics and rule.is_broken_by(metrics[rule.metric])), None)


def _rule(field: str, guard: GuardConfig) -> GuardRule:
    if guard.above is None and guard.below is None:
        raise ConfigError.needs(field, "a bound", f"set {field}.above or {field}.below")
    if guard.above is not None and guard.below is not None:
        raise ConfigError.of(f"{field}.below", guard.below, "stands beside above", allowed="in a guard of its own")
    if guard.action == "skip" and guard.for_steps > 1:
        reason = "action = 'skip' cannot wait for: an update is skipped at once"
        raise ConfigError.of(f"{field}.for_steps", guard.for_steps, reason, allowed="1")
    if guard.above is not None:
        return GuardRule(guard.action, guard.metric, "above", guard.above, guard.for_steps)
    assert guard.below is not None
    return GuardRule(guard.action, guard.metric, "below", guard.below, guard.for_steps)
