"""Words of a run: metrics, trackers, phase times, progress and the summary. Knows nothing of megatron, ray or sglang."""

from megarl.observe.distributions import distributions
from megarl.observe.metrics import MetricsFile, read_metrics
from megarl.observe.phases import Phases, StepTimes
from megarl.observe.progress import Progress, evaluation_line
from megarl.observe.summary import build_summary, machine, read_summary, versions, write_summary

__all__ = [
    "MetricsFile", "Phases", "Progress", "StepTimes", "build_summary", "distributions", "evaluation_line", "machine",
    "read_metrics", "read_summary", "versions", "write_summary",
]  # fmt: skip
