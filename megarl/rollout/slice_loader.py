"""Loads weights that were sliced for this tensor-parallel rank; SGLang calls it inside the server's processes.

Given to the server as `--custom-weight-loader`. SGLang's layers can be told that what they load is sharded already
(`use_presharded_weights`); they are told so for the time of a bucket. The embeddings' way of it knows no padded vocabulary,
so their rows are copied here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

BY_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def load(model: Any, named_tensors: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Write the slices of one bucket into `model`: pairs of (name, dtype, shape, start, stop of each slice) and the bytes."""
    parameters = dict(model.named_parameters())
    for places, buffer in named_tensors:
        slices = [
            (name, buffer[start:stop].view(getattr(torch, dtype)).view(shape)) for name, dtype, shape, start, stop in places
        ]
        rest = []
        for name, rows in slices:
            if name.endswith(BY_VOCABULARY) and name in parameters:
                held = parameters[name].data
                held[: len(rows)].copy_(rows)
                held[len(rows) :].zero_()
            else:
                rest.append((name, rows))
        if rest:
            with _sharded_already(model):
                model.load_weights(rest)


@contextlib.contextmanager
def _sharded_already(model: Any) -> Iterator[None]:
    """Inside, the layers that tensor parallelism splits load slices; experts, which come whole, are split as ever."""
    layers = [m for m in model.modules() if getattr(m, "use_presharded_weights", None) is False and not _has_experts(m)]
    for layer in layers:
        layer.use_presharded_weights = True
    try:
        yield
    finally:
        for layer in layers:
            layer.use_presharded_weights = False


def _has_experts(layer: Any) -> bool:
    return hasattr(layer, "w13_weight") or hasattr(layer, "num_local_experts")
