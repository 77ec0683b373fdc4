"""The spread of tokens over experts: what a step's updates routed, as figures and as a line of `experts.jsonl`.

Plain values: ranks count (`megatron/router_watch.py`), the driver writes, the report draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

EXPERTS = "experts"
"""Name of an update's metric that is no number: by layer (zero-based) the tokens routed there."""


class LayerRouting(NamedTuple):
    """Routing of one layer: sums over tokens, of which one counts once for each sequence that it belongs to.

    `loads` are the tokens that each expert got, of `top_k * tokens` choices; `scores` the sums of its normalised scores.
    `entropy` is of these scores' distribution in nats, `z_loss` the squared log of the sum of exponentials of the logits.
    `sequence_balance` is no sum: the balance loss of a sequence, mean over sequences. `bias_spread` is the largest less the
    smallest expert bias.
    """

    top_k: int
    tokens: float
    loads: tuple[float, ...]
    scores: tuple[float, ...]
    entropy: float
    z_loss: float = 0.0
    sequence_balance: float = 0.0
    bias_spread: float = 0.0

    @property
    def imbalance(self) -> float:
        """Load of the busiest expert over the mean load; 1 where all have as much, or nothing was routed."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    @property
    def balance_loss(self) -> float:
        """experts · Σᵢ (share of the choices that fell on expert i) · (mean score of i); 1 where loads or scores are even."""
        shares = [load / max(self.top_k * self.tokens, 1.0) for load in self.loads]
        means = [score / max(self.tokens, 1.0) for score in self.scores]
        return len(shares) * sum(share * mean for share, mean in zip(shares, means, strict=True))


def routing_figures(layers: Mapping[int, LayerRouting]) -> dict[str, float]:
    """One update's metrics: means over layers, and the imbalance of the worst; what is off (0 in every layer) is left out."""
    rows = list(layers.values())
    experts = sum(len(row.loads) for row in rows)
    figures = {
        "expert_imbalance": _mean([row.imbalance for row in rows]),
        "expert_imbalance_max": max(row.imbalance for row in rows),
        "idle_experts": sum(load == 0 for row in rows for load in row.loads) / experts,
        "router_entropy": _mean([row.entropy / max(row.tokens, 1.0) for row in rows]),
        "balance_loss": _mean([row.balance_loss for row in rows]),
    }
    dropped = _mean([1 - sum(row.loads) / max(row.top_k * row.tokens, 1.0) for row in rows])
    optional = {
        "dropped_choices": dropped if dropped > 1e-9 else 0.0,
        "sequence_balance_loss": _mean([row.sequence_balance for row in rows]),
        "router_z_loss": _mean([row.z_loss / max(row.tokens, 1.0) for row in rows]),
        "expert_bias_spread": _mean([row.bias_spread for row in rows]),
    }
    return figures | {name: value for name, value in optional.items() if value}


def experts_line(updates: Sequence[Mapping[int, LayerRouting]]) -> dict[str, Any]:
    """Routing of a step's updates together: `layers`, their `loads` over the mean load by expert, and `entropy` in nats."""
    layers = sorted({layer for update in updates for layer in update})
    rows = [[update[layer] for update in updates if layer in update] for layer in layers]
    loads = [[sum(of_expert) for of_expert in zip(*(row.loads for row in of_layer), strict=True)] for of_layer in rows]
    tokens = [max(sum(row.tokens for row in of_layer), 1.0) for of_layer in rows]
    return {
        "layers": layers,
        "loads": [[round(load * len(row) / max(sum(row), 1.0), 3) for load in row] for row in loads],
        "entropy": [
            round(sum(row.entropy for row in of_layer) / total, 4) for of_layer, total in zip(rows, tokens, strict=True)
        ],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
