"""The figures that every run checks itself by: trainer against reference at the start, trainer against engine after a sync."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import Config

KL_TO_ITSELF = 1e-4
"""Nats per token: more than rounding makes of the KL to a model that is the policy's copy."""
FLOAT32_DIFFERENCE = 1e-3
"""Nats: more than float32 makes of one token's log-prob in two programs with the same weights."""


def bounds(config: Config) -> dict[str, float]:
    """The greatest sound value of each figure that has one.

    The KL has one where there is a reference, unless that is another model. Of engines it takes float32 on both sides and
    responses of the newest weights: how far bfloat16 or weights in fewer bits move a log-prob depends on the model.
    """
    limits = {}
    if config.uses_reference and config.reference.path in (None, config.model.path):
        limits["kl_to_reference_at_first_step"] = KL_TO_ITSELF
    model, schedule, arguments = config.model, config.rollout.schedule, config.rollout.engine_args
    is_float32 = model.dtype == "float32" and model.fp8 == "none" and not model.int4_experts
    serves_it = config.rollout.servers.model_path is None and not arguments.keys() & {"quantization", "dtype", "kv_cache_dtype"}
    same_weights = schedule.mode == "sync" and not schedule.continues and not schedule.over_sample
    if is_float32 and serves_it and same_weights:
        limits |= dict.fromkeys(("log_prob_max_difference_as_loaded", "log_prob_max_difference_after_sync"), FLOAT32_DIFFERENCE)
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
