"""The controller of the entropy bonus's weight (docs/methods.md#adaptive-entropy-coefficient)."""

from __future__ import annotations


class AdaptiveEntropy:
    """c, the weight of an entropy bonus that is given only at or below a target entropy (Skywork-OR1, arXiv 2505.22312).

    Args:
        coef: the first c, in [0, `max_coef`].
        target: mean entropy per token that is not to be left downwards, in nats; above 0.
        delta: by how much c moves after a step; above 0.
        max_coef: the largest c; above 0.
    """

    def __init__(self, coef: float, target: float, delta: float, max_coef: float) -> None:
        self.coef, self.target, self.delta, self.max_coef = coef, target, delta, max_coef

    def update(self, entropy: float) -> float:
        """The weight of a step that begins with mean entropy `entropy`: c at or below the target, else 0. Then moves c.

        c grows by `delta` if the entropy is at or below the target, and shrinks by it if above; it stays in [0, `max_coef`].
        """
        below = entropy <= self.target
        weight = self.coef if below else 0.0
        self.coef = min(self.coef + self.delta, self.max_coef) if below else max(self.coef - self.delta, 0.0)
        return weight

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint; the other numbers come from the config."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict()`'s answer."""
        self.coef = state["coef"]
