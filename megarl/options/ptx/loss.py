"""The loss of supervised examples, as a value that the driver sends to the ranks (docs/methods.md#supervised-mix-ptx)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from megarl.data.stream import PackedStream


@dataclass(frozen=True)
class PtxLoss:
    """Cross-entropy with the column `ptx_weights`, times `coef`."""

    coef: float
    column: ClassVar[str] = "ptx_weights"

    def __call__(self, log_probs: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        """Log-probs `[N]` → the loss, and `ptx/loss` without the coefficient."""
        cross_entropy = -(stream.columns[self.column] * log_probs).sum()
        return self.coef * cross_entropy, {"ptx/loss": cross_entropy.detach()}
