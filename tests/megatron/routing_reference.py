"""What transformers' routers decide, each response alone behind its prompt, and the dense formulas over all of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.data.stream import Unit


@dataclass
class Routed:
    """One sequence in one layer: float64 `[T, E]` logits and normalised scores with gradients, and the choices, 0 or 1."""

    logits: Tensor
    scores: Tensor
    chosen: Tensor


def normalised(logits: Tensor, family: str) -> Tensor:
    """Scores over all experts that sum to one: softmax, or sigmoids over their sum."""
    if family in ("mixtral", "qwen3_moe"):
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


class RecordedRouters:
    """Hooks on the gates of a model: by layer what they routed in the forward passes so far, one entry for each pass."""

    def __init__(self, model: Any, family: str) -> None:
        self.layers: dict[int, list[Routed]] = {}
        for number, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "gate"):
                self.layers[number] = []
                layer.mlp.gate.register_forward_hook(self._hook(number, family))

    def _hook(self, number: int, family: str) -> Any:
        def record(gate: Any, inputs: tuple[Tensor], outputs: tuple[Tensor, ...]) -> None:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            logits = hidden.double() @ gate.weight.double().T
            chosen = torch.zeros_like(logits).scatter_(1, outputs[-1], 1.0).detach()
            self.layers[number].append(Routed(logits, normalised(logits, family), chosen))

        return record


def sequences(units: list[Unit]) -> list[tuple[Tensor, Any]]:
    """(ids of a prompt and its response, the last of which is fed to no model, response) of all responses."""
    return [(torch.cat([unit.prompt_ids, one.token_ids])[None], one) for unit in units for one in unit.responses]


def policy_loss(output: Tensor, stream: Any) -> tuple[Tensor, dict[str, float]]:
    """−Σ weight·log-prob, for ranks; `dense_policy_loss` is the same of a whole model."""
    return -(stream.columns["weights"] * output[:, 0]).sum(), {}


def dense_policy_loss(model: Any, units: list[Unit]) -> Tensor:
    """−Σ weight·log-prob of the scored tokens of all responses, each by itself behind its prompt."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, response in sequences(units):
        log_p = model(ids[:, :-1]).logits[0, -len(response.token_ids) :].log_softmax(-1)
        picked = log_p.gather(1, response.token_ids[:, None])[:, 0]
        total = total - (response.columns["weights"] * picked)[response.mask].sum()
    return total
