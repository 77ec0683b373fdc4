"""The parameters of a rank under the weight map's names, whose indices of layers and experts count through the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megarl.models.weight_map import PREDICTION

IN_CHECKPOINTS = ("mlp.router.expert_bias", "mlp.router.token_experts", ".layer_scalar")
"""Ends of names of the buffers that are part of a checkpoint."""

_PREDICTION_LAYER = f"{PREDICTION}layers.0.transformer_layer."

# An expert's place among those of its rank: in a sequential and in a grouped module.
_LOCAL_EXPERT = re.compile(
    r"(?<=^mlp\.experts\.local_experts\.)\d+(?=\.)|(?<=^mlp\.experts\.linear_fc[12]\.weight)\d+$"
    r"|(?<=^mlp\.experts\.linear_fc[12]\.bias)\d+$"
    r"|(?<=^mlp\.experts\.linear_fc[12]_lora\.local_experts\.)\d+(?=\.)"
)


def global_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(name with global, zero-based layer and expert indices, parameter or checkpointed buffer) of all on this rank."""
    for chunk in chunks:
        core: Any = unwrap_model(chunk)
        buffers = ((name, buffer) for name, buffer in core.named_buffers() if name.endswith(IN_CHECKPOINTS))
        for name, tensor in (*core.named_parameters(), *buffers):
            yield _global_name(core, name), tensor


def _global_name(core: Any, name: str) -> str:
    prefix = "decoder.layers."
    if name.startswith(_PREDICTION_LAYER):
        rest = name.removeprefix(_PREDICTION_LAYER)
        return _PREDICTION_LAYER + _with_global_expert(core.mtp.layers[0].transformer_layer, rest)
    if not name.startswith(prefix):
        return name
    local_layer, rest = name.removeprefix(prefix).split(".", 1)
    layer = core.decoder.layers[int(local_layer)]
    return f"{prefix}{layer.layer_number - 1}.{_with_global_expert(layer, rest)}"


def _with_global_expert(layer: Any, name: str) -> str:
    return _LOCAL_EXPERT.sub(lambda match: str(layer.mlp.local_expert_indices[int(match[0])]), name)
