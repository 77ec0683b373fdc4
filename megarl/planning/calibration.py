"""Factors of a plan's seconds: assumed shares of the peaks, and factors fitted to the phases that a run recorded."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config import Config, load_config
from megarl.errors import ConfigError

SCALED = ("sync", "generate", "log_probs", "update")
"""Phases whose seconds a fit scales; those of `reward` go by sample, and all others are the driver's own."""
NEEDED = ("time/step_s", "rollout/samples", "response/tokens_mean", "speed/tokens_per_s")
"""Metrics that a step must have to be fitted to."""


@dataclass(frozen=True)
class Calibration:
    """Factors by phase on top of what follows from a GPU's peaks and its efficiencies (`efficiencies.py`)."""

    source: str = "constants fitted to runs on H100 that others published (docs/planning.md)"
    scales: Mapping[str, float] = field(default_factory=dict)
    reward_s_per_sample: float = 0.0
    other_s: float = 0.0
    whole_pass: bool = False
    """Whether old log-probs are of a pass over all rows, as other trainers have it, and none are left to the first update."""

    def scale(self, phase: str) -> float:
        """The factor of the seconds of a phase."""
        return self.scales.get(phase, 1.0)


@dataclass(frozen=True)
class Recorded:
    """A run's own figures: its config, medians of seconds by phase, and mean lengths, over `steps` steps."""

    folder: str
    config: Config
    phases: Mapping[str, float]
    prompt_tokens: float
    response_tokens: float
    samples: float
    steps: int

    @property
    def other_s(self) -> float:
        """Seconds of a step outside the phases that a plan has."""
        return sum(seconds for phase, seconds in self.phases.items() if phase not in (*SCALED, "reward"))


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row that are finite numbers: a run's folder may be damaged, or somebody else's."""
    return {name: value for name, value in row.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def read_run(folder: str | Path, option: str = "--calibrate") -> Recorded:
    """What a run recorded; of three steps or more the first, which warms up, is left out.

    Raises:
        ConfigError: the folder has no config.yaml, or no step with times in its metrics.jsonl.
    """
    from megarl.observe.metrics import read_metrics

    config = load_config(Path(folder) / "config.yaml")
    rows = [_numbers(row) for row in read_metrics(Path(folder) / "metrics.jsonl")]
    steps = [row for row in rows if all(row.get(name, 0.0) > 0 for name in NEEDED)]
    if not steps:
        raise ConfigError(f"{option} is '{folder}', but its metrics.jsonl has no step with times; it must be a run's folder")
    steps = steps[1:] if len(steps) > 2 else steps
    names = {name for step in steps for name in step if name.startswith("time/") and name != "time/step_s"}
    phases = {name[5:-2]: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
    samples, responses = (statistics.mean(step[name] for step in steps) for name in ("rollout/samples", "response/tokens_mean"))
    tokens = statistics.mean(step["speed/tokens_per_s"] * step["time/step_s"] / step["rollout/samples"] for step in steps)
    return Recorded(str(folder), config, phases, max(1.0, tokens - responses), responses, samples, len(steps))
