"""Steps that were measured, by phase: rows of a table or a run's own records; and plans of the same steps, fitted to them.

Factors of phases are fitted to one run, the constants of a kind of GPU to several.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

from megarl.config import AnyConfig, load_any
from megarl.errors import ConfigError, counted, nearest
from megarl.planning.calibration import SCALED, Calibration, Recorded, read_run
from megarl.planning.efficiencies import Efficiencies, is_share
from megarl.planning.gpus import GpuSpec
from megarl.planning.plan import CapacityPlan, lengths_of, make_plan

STEP = "step"
"""The name of the whole step beside those of its phases."""
FITTED = ("products", "unequal", "links", "decoding", "decoding_step_s", "expert_layer_s", "update_s", "turn_gb_per_s")
"""Constants of a GPU that several runs are fitted by."""
PRIOR = 0.02
"""Weight of a constant's squared logarithm beside that of a phase: what no run tells stays as it was."""
FACTORS = (0.6, 0.8, 0.9, 0.96, 0.99, 1.01, 1.04, 1.1, 1.25, 1.6)
ROUNDS = 30


@dataclass(frozen=True)
class Measured:
    """A measured step: seconds by phase (`step` is the whole), mean lengths, and the config of the run.

    `memory` has `ran` (whether it did) and `adjust`: factors of parts, or of all of a role, that the run kept otherwise than
    megarl does. `fitted`: whether the defaults of `Efficiencies` were fitted to it. `whole_pass` is as in `Calibration`.
    """

    name: str
    config: AnyConfig
    phases: Mapping[str, float]
    prompt_tokens: float
    response_tokens: float
    gpu: str | None = None
    memory: Mapping[str, Any] | None = None
    fitted: bool = False
    whole_pass: bool = False
    source: str = ""
    url: str = ""
    note: str = ""

    def plan(self, gpu: GpuSpec) -> CapacityPlan:
        """The plan of the same step."""
        lengths = lengths_of(self.config, self.prompt_tokens, self.response_tokens)
        return make_plan(self.config, gpu, lengths=lengths, calibration=Calibration(whole_pass=self.whole_pass))


@dataclass(frozen=True)
class Compared:
    """A phase as planned and as measured, in seconds."""

    phase: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Below 1: the plan is too fast."""
        return self.predicted / self.measured


def compare(plan: CapacityPlan, measured: Measured) -> list[Compared]:
    """Every phase that was measured, and that the plan has."""
    times = plan.times
    planned = {phase.name: phase.seconds for phase in times.phases} | {STEP: times.step_seconds}
    return [
        Compared(name, planned[name], seconds) for name, seconds in measured.phases.items() if seconds and planned.get(name)
    ]


def held_bytes(plan: CapacityPlan, measured: Measured) -> float:
    """Bytes of the fullest GPU in the fullest turn, with what the measured run kept otherwise."""
    adjust = (measured.memory or {}).get("adjust", {})

    def of_turn(parts: Mapping[tuple[str, str], float]) -> float:
        return sum(size * adjust.get(part, 1.0) * adjust.get(owner, 1.0) for (owner, part), size in parts.items())

    return max(of_turn(parts) for gpu in plan.memory.gpus for parts in gpu.turns.values())


def read_measured(path: str | Path, config: AnyConfig) -> Measured:
    """What was measured of `config`: the row of a table that has its `run.name`, or its only row; or a run's folder.

    Raises:
        ConfigError: the file cannot be read or has no row for this config, or the folder is not a run's.
    """
    if Path(path).is_dir():
        run = read_run(path, "--against")
        step = sum(run.phases.values())
        return Measured(str(path), config, {**run.phases, STEP: step}, run.prompt_tokens, run.response_tokens)
    rows = _rows(path)
    matches = rows if len(rows) == 1 else [row for row in rows if row["id"] == config.run.name]
    if not matches:
        names = [row["id"] for row in rows]
        raise ConfigError(
            f"--against is '{path}', which has no row whose id is '{config.run.name}', the config's run.name"
            f"{nearest(config.run.name, names)}; it has {', '.join(names)}"
        )
    return _measured(matches[0], config, path)


def read_table(path: str | Path) -> list[Measured]:
    """All rows of a table whose rows name their configs, relative to the table.

    Raises:
        ConfigError: the table or a config cannot be read.
    """
    return [_measured(row, load_any(Path(path).parent / row["config"], []), path) for row in _rows(path)]


def _rows(path: str | Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--against is '{path}', which cannot be read as JSON: {error}") from error
    rows = rows if isinstance(rows, list) else [rows]
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("id"), str) or not isinstance(row.get("published"), dict):
            raise ConfigError(
                f"--against is '{path}'; its rows must have `id`, `published`, `prompt_tokens`, `response_tokens`"
            )
    return rows


def _measured(row: Mapping[str, Any], config: AnyConfig, path: str | Path) -> Measured:
    phases = {name: seconds for name, seconds in row["published"].items() if not isinstance(seconds, dict)}
    for name in ("prompt_tokens", "response_tokens", *phases):
        value = row.get(name, phases.get(name))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ConfigError(f"{path}: {name} of '{row['id']}' is {value!r}; it must be a number above 0")
    return Measured(
        row["id"],
        config,
        phases,
        row["prompt_tokens"],
        row["response_tokens"],
        gpu=row.get("gpu"),
        memory=row.get("memory"),
        **{name: row[name] for name in ("fitted", "whole_pass", "source", "url", "note") if name in row},
    )


def calibrated(folder: str | Path, gpu: GpuSpec) -> Calibration:
    """The calibration by a run that was made on GPUs of this kind.

    Raises:
        ConfigError: the run's config or metrics cannot be read.
    """
    return fit(read_run(folder), gpu)


def fitted_gpu(folders: Sequence[str | Path], gpu: GpuSpec) -> tuple[Calibration, GpuSpec]:
    """The kind of GPU with constants that are fitted to several runs, and what the runs' rewards and drivers took.

    Raises:
        ConfigError: a run's config or metrics cannot be read.
    """
    runs = [read_run(folder) for folder in folders]
    steps = []
    for run in runs:
        phases = {name: run.phases[name] for name in SCALED if run.phases.get(name)}
        steps.append(Measured(run.folder, run.config, phases, run.prompt_tokens, run.response_tokens))
    efficiencies = fit_constants(steps, gpu)
    rewards = [run.phases.get("reward", 0.0) / run.samples for run in runs]
    changed = {
        name: getattr(efficiencies, name) for name in FITTED if getattr(efficiencies, name) != getattr(gpu.efficiencies, name)
    }
    stated = ", ".join(f"{name} {value:.3g}" for name, value in changed.items())
    source = f"constants fitted to {len(runs)} runs: {stated or 'none changed'}"
    calibration = Calibration(source, reward_s_per_sample=mean(rewards), other_s=mean(run.other_s for run in runs))
    return calibration, replace(gpu, efficiencies=efficiencies)


def fit(recorded: Recorded, gpu: GpuSpec) -> Calibration:
    """Factors with which the plan of the recorded run takes as long as it did."""
    lengths = lengths_of(recorded.config, recorded.prompt_tokens, recorded.response_tokens)
    times = make_plan(recorded.config, gpu, lengths=lengths).times
    scales = {
        phase: recorded.phases[phase] / times.seconds(phase)
        for phase in SCALED
        if recorded.phases.get(phase) and times.seconds(phase)
    }
    rewards = max(0.0, recorded.phases.get("reward", 0.0) - times.seconds("reward"))
    stated = ", ".join(f"{phase} x {factor:.3g}" for phase, factor in scales.items())
    source = f"{counted(recorded.steps, 'step')} of {recorded.folder}, against the assumptions: {stated}"
    return Calibration(source, scales=scales, reward_s_per_sample=rewards / recorded.samples, other_s=recorded.other_s)


def fit_constants(steps: Iterable[Measured], gpu: GpuSpec, names: Sequence[str] = FITTED) -> Efficiencies:
    """The constants with which the plans of these steps come nearest to them: least squares of logarithms, one at a time.

    Shares stay at most 1; each constant is drawn to where it was by `PRIOR`.
    """
    plans = [(step, step.plan(gpu)) for step in steps]
    first = best = gpu.efficiencies
    least = _error(plans, gpu, best, first)
    for _ in range(ROUNDS):
        before = least
        for name in names:
            for factor in FACTORS:
                value = getattr(best, name) * factor
                if is_share(name) and value > 1:
                    continue
                tried = replace(best, **{name: value})
                error = _error(plans, gpu, tried, first)
                if error < least:
                    best, least = tried, error
        if before - least < 1e-4:
            break
    return best


def _error(plans: Sequence[tuple[Measured, CapacityPlan]], gpu: GpuSpec, tried: Efficiencies, first: Efficiencies) -> float:
    spec = replace(gpu, efficiencies=tried)
    errors = [log(comparison.ratio) ** 2 for step, plan in plans for comparison in compare(replace(plan, gpu=spec), step)]
    moved = [log(getattr(tried, name) / getattr(first, name)) ** 2 for name in vars(first) if getattr(first, name)]
    return sum(errors) + PRIOR * sum(moved)
