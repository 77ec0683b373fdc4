"""The keys that the indexers of a transformers model choose, taken down as its layers are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.options.sparse_attention.column import COLUMN, Keys, packed


class KeyRecorder:
    """Takes down what the indexers of a model answer, while `is_on`."""

    name = COLUMN.name

    def __init__(self, model: torch.nn.Module) -> None:
        """Families of transformers (5.19) have a module `indexer`, which answers columns of the cache, int `[B, S, k]`."""
        self.is_on = False
        self._is_token = torch.empty(0)
        self._chosen: list[Tensor] = []
        indexers = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "indexer"]
        if indexers:
            model.register_forward_pre_hook(self._see_mask, with_kwargs=True)
        for module in indexers:
            module.register_forward_hook(self._take_down)

    def _see_mask(self, module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.is_on:
            self._is_token = named["attention_mask"].bool()

    def _take_down(self, module: torch.nn.Module, given: tuple[Any, ...], columns: Tensor) -> None:
        if self.is_on:
            self._chosen.append(self._by_position(columns.long()))

    def _by_position(self, columns: Tensor) -> Tensor:
        """bool `[B, S, longest]`: whether the token at a position is chosen, from columns of the cache, of which queries that
        see fewer than k keys answer some that they don't see."""
        is_token, queries = self._is_token, columns.shape[1]
        size = is_token.shape[1]
        column = torch.arange(size, device=columns.device)
        seen = is_token[:, None] & (column <= column[size - queries :, None])
        chosen = torch.zeros_like(seen).scatter_(-1, columns, True) & seen
        position = (is_token.cumsum(1) - 1).clamp(min=0)[:, None].expand_as(chosen)
        counts = torch.zeros_like(chosen, dtype=torch.uint8).scatter_add_(-1, position, chosen.to(torch.uint8))
        return counts[..., : int(is_token.sum(1).max())] > 0

    def take(self, batch: int) -> Keys | None:
        """`[batch, tokens, indexers, W]` of the last forward pass; None where nothing was taken down."""
        chosen, self._chosen = self._chosen, []
        return packed(torch.stack(chosen, dim=2).cpu().numpy()) if chosen else None


def open_recorder(model: torch.nn.Module) -> KeyRecorder:
    """The recorder of an engine's model."""
    return KeyRecorder(model)
