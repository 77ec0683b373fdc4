"""Positions of padded rows for models of transformers that count by the cache: Llama 4 scales queries by its length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_by_position_ids(model: Any) -> None:
    """Have layers without rotary embedding scale queries by the `position_ids` that a pass is given, where it is given any.

    transformers counts rows' padding among their positions. A query is scaled as it leaves its projection, which is the same.
    """
    layers = [module for module in model.modules() if getattr(module, "attn_temperature_tuning", False)]
    given: dict[str, Tensor | None] = {"position_ids": None}

    def take(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given["position_ids"] = kwargs.get("position_ids")
        for layer in layers:
            layer.attn_temperature_tuning = given["position_ids"] is None

    def scale(layer: Any, queries: Tensor) -> Tensor:
        positions = given["position_ids"]
        if positions is None:
            return queries
        factors = torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
        return (queries * factors[..., None]).to(queries.dtype)

    for layer in layers:
        if not layer.use_rope:
            layer.q_proj.register_forward_hook(lambda _, inputs, queries, layer=layer: scale(layer, queries))
    if layers:
        model.register_forward_pre_hook(take, with_kwargs=True)
