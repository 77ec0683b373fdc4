"""The embedded engine with routers that send every token to other experts than the trainer's do."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from megarl.rollout.engines.embedded import EmbeddedEngine


class CrookedEngine(EmbeddedEngine):
    """Each choice is the expert after the one that the router would choose, weighted by its own score (Qwen3-MoE)."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for layer in self._model.model.layers:
            gate = layer.mlp.gate
            gate.forward = partial(_next_experts, gate, gate.forward)


def _next_experts(gate: Any, choose: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, _, chosen = choose(hidden)
    others = (chosen + 1) % gate.num_experts
    weights = logits.float().softmax(-1).gather(1, others)
    return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), others
