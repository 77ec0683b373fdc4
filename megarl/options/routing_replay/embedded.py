"""The experts that a transformers model chooses, taken down as its layers are computed."""

from __future__ import annotations

from typing import Any

import torch

from megarl.options.routing_replay.column import COLUMN, Routes, compact


class RouteRecorder:
    """Takes down what the layers with experts of a model are given to compute, while `is_on`."""

    name = COLUMN.name

    def __init__(self, model: torch.nn.Module) -> None:
        """Every family of transformers (5.19) has a module `experts`, called with states, choices `[n, k]` and weights."""
        self.is_on = False
        self._chosen: list[torch.Tensor] = []
        experts: list[Any] = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
        # LongCat-Flash's are more than those that compute something.
        counts = [getattr(module, "total_experts", None) or module.num_experts for module in experts]
        self.num_experts = max(map(int, counts), default=0)
        for module in experts:
            module.register_forward_pre_hook(self._take_down, with_kwargs=True)

    def _take_down(self, module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.is_on:
            self._chosen.append(given[1] if len(given) > 1 else named["top_k_index"])

    def take(self, batch: int) -> Routes | None:
        """`[batch, tokens, layers, k]` of the last forward pass; None where nothing was taken down."""
        chosen, self._chosen = self._chosen, []
        if not chosen:
            return None
        whole = torch.stack(chosen, dim=1).cpu().numpy()
        return compact(whole.reshape(batch, -1, *whole.shape[1:]), self.num_experts)


def open_recorder(model: torch.nn.Module) -> RouteRecorder:
    """The recorder of an engine's model."""
    return RouteRecorder(model)
