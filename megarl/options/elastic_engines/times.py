"""Lines of a plan about engines that come and go."""

from __future__ import annotations

from typing import Any

from megarl.options.elastic_engines.section import max_engines_of
from megarl.planning.plan import CapacityPlan


def times_as_json(plan: CapacityPlan) -> dict[str, Any]:
    """Numbers of engines of a run whose engines come and go, which stand beside the phases of a step."""
    sampling = plan.run.config.sampling
    most = None if sampling is None else max_engines_of(sampling)
    return {} if sampling is None or most is None else {"engines": {"min": sampling.engines, "max": most}}


def stated(plan: CapacityPlan) -> list[str]:
    """The line on how many engines there may be; none where their number is fixed."""
    sampling = plan.run.config.sampling
    most = None if sampling is None else max_engines_of(sampling)
    if sampling is None or most is None:
        return []
    gpus = f"{(most - sampling.engines) * sampling.tp:,}"
    return [
        f"Engines come and go: at least {sampling.engines:,}, as which the step is planned, and at most {most:,}, on {gpus} "
        "further GPUs"
    ]
