"""Loads weights that were sliced for this tensor-parallel rank; SGLang calls it inside the server's processes.

Given to the server as `--custom-weight-loader`. SGLang's own loaders cut whole weights; that their layers can be told that what
they load is sharded already (`use_presharded_weights`) holds on a CPU for rank 0 alone (SGLang 0.5.23), so slices are copied
to their places here. Experts come whole and go through the model's own loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megarl.rollout.checksums import PARTS, SPLIT_BY_VOCABULARY, engine_name, is_of_experts


def load(model: Any, named_tensors: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Write the slices of one bucket into `model`: pairs of (name, dtype, shape, start, stop of each slice) and the bytes."""
    parameters = dict(model.named_parameters())
    whole = []
    for places, buffer in named_tensors:
        for name, dtype, shape, start, stop in places:
            part = buffer[start:stop].view(getattr(torch, dtype)).view(shape)
            parameter, position = engine_name(name)
            if is_of_experts(parameter):
                whole.append((name, part))
            else:
                _copy(parameters[parameter].data, part, parameter, position)
    if whole:
        model.load_weights(whole)


def _copy(held: torch.Tensor, part: torch.Tensor, parameter: str, position: int) -> None:
    """Copy `part` to its rows of a parameter, of which it is the whole, a fused part, or the rows before the padding."""
    count = next((count for suffix, count in PARTS.items() if f".{suffix}." in parameter), 1)
    # of q, k, v only q is of another length than the others, and it is the first
    first = 0 if position == 0 else len(held) - (count - position) * len(part)
    if part.shape[1:] != held.shape[1:] or not 0 <= first <= len(held) - len(part):
        raise ValueError(f"a slice of shape {list(part.shape)} was sent for {parameter}, which is {list(held.shape)}")
    held[first : first + len(part)].copy_(part)
    if parameter.endswith(SPLIT_BY_VOCABULARY):
        held[len(part) :].zero_()
    elif count == 1 and len(part) != len(held):
        raise ValueError(f"{len(part)} of the {len(held)} rows of {parameter} were sent")
