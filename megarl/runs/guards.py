"""Numerical guards of a run: updates that are skipped are counted, and a run that leaves its bounds goes back or stops.

The rules are `run.guards`. The ranks judge `skip` before an optimizer step (`megatron/update_guard.py`), which they do without
any rule for a loss or gradients that are not finite; here is what the driver knows before the update, and what follows a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.guard_rules import GuardConfig, GuardRule, judge, parse_guards
from megarl.errors import CheckpointError, ConfigError, GuardError, nearest
from megarl.observe.run_state import GuardCounts
from megarl.runs.manifest import check

NON_FINITE_IN_A_ROW = 3
"""Updates of a role in a row whose loss or gradients are not finite, after which a run stops."""
MOST_ROLLBACKS = 3
"""Times that a run goes back to a checkpoint before it stops instead."""


class Guards:
    """Watches the metrics of one run; see `run.guards`."""

    def __init__(self, guards: Sequence[GuardConfig]) -> None:
        self.rules = parse_guards(guards)
        self.skipped = Counter[str]()
        self.rollbacks = 0
        self.applied = Counter[GuardRule]()
        """By rule, how often it applied as the driver saw it: ranks that skip an update do not say by which."""
        self._broken_for = Counter[GuardRule]()
        self._non_finite_for = Counter[str]()
        self._known_before_update: set[str] = set()
        self._names_are_checked = False

    def should_skip(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a `skip` rule forbids the update by what is known before it."""
        self._known_before_update |= metrics.keys()
        rule = judge([rule for rule in self.rules if rule.action == "skip"], metrics)
        self.applied.update([rule] if rule is not None else ())
        return rule is not None

    def record_update(self, metrics: Mapping[str, float]) -> None:
        """Count what an update's roles say of themselves (`<role>/skipped`, `<role>/non_finite`)."""
        for name, value in metrics.items():
            role, _, what = name.partition("/")
            if what == "skipped":
                self.skipped[role] += int(value)
            elif what == "non_finite":
                self._non_finite_for[role] = self._non_finite_for[role] + 1 if value else 0

    def check_step(self, metrics: Mapping[str, float], update_names: Sequence[str]) -> GuardRule | None:
        """The rule that is due after a step with these metrics: a rollback, which the caller does.

        `update_names` are the metrics that the trained model's ranks gave; empty where it was not updated.

        Raises:
            ConfigError: a rule is about a metric that the run does not have, or has only after the update it would skip.
            GuardError: a rule says to stop, too many updates in a row were not finite, or the run went back too often.
        """
        self._check_names(metrics, set(update_names))
        for role, count in self._non_finite_for.items():
            if count >= NON_FINITE_IN_A_ROW:
                raise GuardError(
                    f"{role}: {count} updates in a row had a loss or gradients that are not finite, and none of them was "
                    "applied; run.resume=auto continues from the newest checkpoint"
                )
        due: GuardRule | None = None
        for rule in self.rules:
            if rule.metric not in metrics or rule.action == "skip":
                continue
            self._broken_for[rule] = self._broken_for[rule] + 1 if rule.is_broken_by(metrics[rule.metric]) else 0
            if self._broken_for[rule] < rule.steps:
                continue
            self.applied[rule] += 1
            if rule.action == "stop":
                raise GuardError(f"the guard '{rule}' applies: {rule.metric} is {metrics[rule.metric]:.6g}")
            due = due or rule
        if due is not None and self.rollbacks >= MOST_ROLLBACKS:
            raise GuardError(
                f"the guard '{due}', and {due.metric} is {metrics[due.metric]:.6g},but the run went back "
                f"{MOST_ROLLBACKS} times already: it stops"
            )
        return due

    def went_back(self) -> None:
        """A rollback was done: rules count from here."""
        self.rollbacks += 1
        self._broken_for.clear()

    def figures(self) -> dict[str, float]:
        """Metrics: updates skipped so far, and rollbacks."""
        return {f"guards/{name}": count for name, count in self.totals().items()}

    def totals(self) -> dict[str, float]:
        """The same by their names alone, for the summary."""
        return {"skipped": float(self.skipped.total()), "rollbacks": float(self.rollbacks)}

    def counts(self) -> GuardCounts:
        """For who watches; another thread may ask."""
        applied = {str(rule): self.applied[rule] for rule in self.rules}
        return GuardCounts(dict(self.skipped), self.rollbacks, applied)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-able."""
        return {
            "skipped": dict(self.skipped),
            "rollbacks": self.rollbacks,
            "non_finite_for": dict(self._non_finite_for),
            "broken_for": {str(rule): count for rule, count in self._broken_for.items()},
            "applied": {str(rule): count for rule, count in self.applied.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state_dict()`'s answer (None: a checkpoint without); counts of rules that are gone are dropped."""
        if state is None:
            return
        self.skipped, self.rollbacks = Counter(state["skipped"]), state["rollbacks"]
        self._non_finite_for = Counter(state["non_finite_for"])
        self._broken_for = Counter({rule: state["broken_for"].get(str(rule), 0) for rule in self.rules})
        self.applied = Counter({rule: state.get("applied", {}).get(str(rule), 0) for rule in self.rules})

    def _check_names(self, metrics: Mapping[str, float], update_names: set[str]) -> None:
        if self._names_are_checked or not update_names:  # while a critic warms up, the policy has no figures yet
            return
        self._names_are_checked = True
        for number, rule in enumerate(self.rules):
            known = update_names | self._known_before_update if rule.action == "skip" else {*metrics}
            if rule.metric in known or (rule.action != "skip" and rule.metric.startswith("eval/")):
                continue
            if rule.metric in metrics:
                raise ConfigError(
                    f"run.guards[{number}] is '{rule}', but {rule.metric} is known only after the update; it must be used with "
                    "rollback or stop"
                )
            raise ConfigError(
                f"run.guards[{number}] is '{rule}', but this run has no metric '{rule.metric}'"
                f"{nearest(rule.metric, known)}; metrics.jsonl has those that it has"
            )


def newest_sound_before(checkpoints: Sequence[Path], step: int, rule: GuardRule) -> Path:
    """The newest undamaged one of `checkpoints` from before the steps that broke `rule`, the last of which is `step`.

    Raises:
        GuardError: there is none.
    """
    for path in reversed(checkpoints):
        if int(path.name.removeprefix("step_")) > step - rule.steps:
            continue
        try:
            check(path)
        except CheckpointError:
            continue
        return path
    raise GuardError(
        f"the guard '{rule}', but after step {step} there is no sound checkpoint from before that; run.save_every and "
        "run.keep_checkpoints say which there are"
    )
