"""The figures that every run checks itself by: trainer against reference at the start, trainer against engine after a sync."""

from __future__ import annotations

from collections.abc import Mapping


class ParityChecks:
    """Collects the parity figures over a run; `None` where a run had no occasion to measure one."""

    def __init__(self) -> None:
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
        """`kl_to_reference_at_first_step` (k3, nats per token) and the largest |Δ log-prob| of trainer against engine, for
        the weights that the engine loaded itself and for weights that were pushed to it."""
        return {
            "kl_to_reference_at_first_step": self._first_kl,
            "log_prob_max_difference_as_loaded": self._before_sync,
            "log_prob_max_difference_after_sync": self._after_sync,
        }
