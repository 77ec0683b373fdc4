"""Distillation in the loss, as a value that the driver sends to the ranks (docs/methods.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megarl.options.distillation.formulas import DistillationTerm, vocabulary_divergence


@dataclass(frozen=True)
class DistillationLoss:
    """Figures of the teacher, and a divergence to it over the tokens behind the first two columns of the output.

    Columns: `teacher_log_probs` (absent: nothing is measured); with `term` also `teacher_scored_log_probs`.
    """

    term: DistillationTerm | None

    def __call__(
        self, output: Tensor, log_probs: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Output `[N, C]` → the weighted divergence `[N]`, and sums `distillation/...`."""
        sums: dict[str, Tensor] = {}
        if "teacher_log_probs" in columns:
            sums["distillation/reverse_kl"] = (log_probs.detach() - columns["teacher_log_probs"]).sum()
        if self.term is None:
            return None, sums
        divergence, figures = vocabulary_divergence(output[:, 2:], columns["teacher_scored_log_probs"], self.term)
        return self.term.coef * divergence, sums | {f"distillation/{name}": value for name, value in figures.items()}
