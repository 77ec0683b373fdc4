"""The experts that transformers chooses, to hold engines against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def chosen_experts(model: Any, ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """`[tokens, expert layers, k]` of a full forward pass, each token's in ascending order."""
    found: list[torch.Tensor] = []
    handles = [
        layer.mlp.experts.register_forward_pre_hook(lambda module, given: found.append(given[1]))
        for layer in model.model.layers
        if hasattr(layer.mlp, "experts")
    ]
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    for handle in handles:
        handle.remove()
    return np.sort(torch.stack(found, 1).numpy())
