"""The figures that every run checks itself by: trainer against reference at the start, trainer against engine after a sync."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from megarl.config import Config
from megarl.option_list import functions

KL_TO_ITSELF = 1e-4
"""Nats per token: more than rounding makes of the KL to a model that is the policy's copy."""
FLOAT32_DIFFERENCE = 1e-3
"""Nats: more than float32 makes of one token's log-prob in two programs with the same weights."""
BFLOAT16_DIFFERENCE = 0.2
"""Nats, times the root of the number of layers: more than bfloat16 makes of one token's log-prob, likewise, in a dense model.

A rounding to 8 bits is off by 0.0017 of the value in the root mean square. A layer makes about 12: of the residual stream and,
five times each, in attention and MLP. They are independent, so the last hidden state is off by 0.0017 √(12 L), two programs by
√2 as much. Logits differ by that share of their spread over the vocabulary, about 3.5: 0.029 √L nats. Largest differences
of 100,000 tokens are 4.4 times the root mean square of a normal distribution, and up to 6 times what was measured, whose
tails are longer (docs/evidence/parity.md). The bound is 7 times it.
"""


def bounds(config: Config, dense_layers: int | None = None) -> dict[str, float]:
    """The greatest sound value of each figure that has one.

    The KL has one where there is a reference, unless that is another model. Of engines it takes the same weights and type on
    both sides, and responses of the newest weights. In bfloat16 it grows with `dense_layers`, the policy's; None: it is not
    known, because tokens may go to other experts, or kernels of a GPU round otherwise. In fewer bits it depends on the model.
    """
    limits = {}
    if config.uses_reference and config.reference.path in (None, config.model.path):
        limits["kl_to_reference_at_first_step"] = KL_TO_ITSELF
    model, schedule, arguments = config.model, config.rollout.schedule, config.rollout.engine_args
    if model.fp8 != "none" or model.int4_experts:
        largest = None
    elif model.dtype == "float32":
        largest = FLOAT32_DIFFERENCE
    else:
        largest = round(BFLOAT16_DIFFERENCE * sqrt(dense_layers), 2) if dense_layers is not None else None
    serves_it = config.rollout.servers.model_path is None and not arguments.keys() & {"quantization", "dtype", "kv_cache_dtype"}
    serves_it = serves_it and not any(rounds(config) for rounds in functions("questions", "engines_round"))
    same_weights = schedule.mode == "sync" and not schedule.continues and not schedule.over_sample
    if largest is not None and serves_it and same_weights:
        limits |= dict.fromkeys(("log_prob_max_difference_as_loaded", "log_prob_max_difference_after_sync"), largest)
    return limits


class ParityChecks:
    """Collects the parity figures over a run; `None` where a run had no occasion to measure one."""

    def __init__(self, *, has_reference: bool) -> None:
        """`has_reference`: the run has one, to compare the policy with; none is loaded for that alone."""
        self._has_reference = has_reference
        self._first_kl: float | None = None
        self._before_sync: float | None = None
        self._after_sync: float | None = None

    def record(self, step: int, metrics: Mapping[str, float], first_update: Mapping[str, float], *, synced: bool) -> None:
        """Take in the metrics of `step` (from 1) and of its first optimizer step, which sees the policy as it was before.

        `synced`: the step's samples came from weights that were pushed.
        """
        if step == 1:
            self._first_kl = first_update.get("kl/reference")
        worst = metrics.get("mismatch/log_prob_max")
        if worst is None:
            return
        if synced:
            self._after_sync = max(worst, self._after_sync or 0.0)
        else:
            self._before_sync = max(worst, self._before_sync or 0.0)

    def load(self, figures: Mapping[str, float | None]) -> None:
        """Continue from the answer of `figures`."""
        self._first_kl = figures.get("kl_to_reference_at_first_step")
        self._before_sync = figures.get("log_prob_max_difference_as_loaded")
        self._after_sync = figures.get("log_prob_max_difference_after_sync")

    def figures(self) -> dict[str, float | None]:
        """`kl_to_reference_at_first_step` (k3, nats per token), if there is one, and the largest |Δ log-prob| of trainer
        against engine, for the weights that the engine loaded itself and for weights that were pushed to it."""
        return ({"kl_to_reference_at_first_step": self._first_kl} if self._has_reference else {}) | {
            "log_prob_max_difference_as_loaded": self._before_sync,
            "log_prob_max_difference_after_sync": self._after_sync,
        }
