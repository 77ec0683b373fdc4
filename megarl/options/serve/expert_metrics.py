"""Metrics of mixtures as the protocol names them: how the tokens of a pass fell on experts. Pure values.

Perfect balance of a layer is its choices (tokens times the experts of each) over its experts. The definitions are those that
the client has beside `ForwardBackwardOutput.metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megarl.observe.expert_load import LayerRouting


def expert_metrics(layers: Mapping[int, LayerRouting]) -> dict[str, float]:
    """Metrics by name from what each layer with experts routed in a pass; none of a model without such layers."""
    rows = [np.asarray(row.loads, np.float64) for row in layers.values() if sum(row.loads)]
    if not rows:
        return {}
    relative = [loads * len(loads) / loads.sum() for loads in rows]  # 1: perfect balance
    worst = [float(row.max()) - 1.0 for row in relative]
    return {
        "e_frac_with_tokens:mean": _mean([float((loads > 0).mean()) for loads in rows]),
        "e_frac_oversubscribed:mean": _mean([float((loads * len(loads) > loads.sum()).mean()) for loads in rows]),
        "e_max_violation:mean": _mean(worst),
        "e_max_violation:max": max(worst),
        "e_min_violation:mean": _mean([float(row.min()) - 1.0 for row in relative]),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
