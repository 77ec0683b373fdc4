"""Fits a plan's seconds to runs: factors of phases to one run, the constants of a kind of GPU to several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import mean

from megarl.planning.calibration import SCALED, Calibration, Recorded, read_run
from megarl.planning.efficiencies import Efficiencies, is_share
from megarl.planning.gpus import GpuSpec
from megarl.planning.measured import Measured, compare
from megarl.planning.plan import CapacityPlan, lengths_of, make_plan

FITTED = ("products", "unequal", "links", "decoding", "decoding_step_s", "expert_layer_s", "update_s", "turn_gb_per_s")
"""Constants of a GPU that several runs are fitted by."""
PRIOR = 0.02
"""Weight of a constant's squared logarithm beside that of a phase: what no run tells stays as it was."""
FACTORS = (0.6, 0.8, 0.9, 0.96, 0.99, 1.01, 1.04, 1.1, 1.25, 1.6)
ROUNDS = 30


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
    found = fit_constants(steps, gpu)
    rewards = [run.phases.get("reward", 0.0) / run.samples for run in runs]
    changed = {name: getattr(found, name) for name in FITTED if getattr(found, name) != getattr(gpu.efficiencies, name)}
    stated = ", ".join(f"{name} {value:.3g}" for name, value in changed.items())
    source = f"constants fitted to {len(runs)} runs: {stated or 'none changed'}"
    calibration = Calibration(source, reward_s_per_sample=mean(rewards), other_s=mean(run.other_s for run in runs))
    return calibration, replace(gpu, efficiencies=found)


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
    source = f"{recorded.steps} steps of {recorded.folder}, against the assumptions: {stated}"
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
    errors = [log(one.ratio) ** 2 for step, plan in plans for one in compare(replace(plan, gpu=spec), step)]
    moved = [log(getattr(tried, name) / getattr(first, name)) ** 2 for name in vars(first) if getattr(first, name)]
    return sum(errors) + PRIOR * sum(moved)
