"""Gives a model a layer for multi-token prediction that it was not trained with: a draft of the EAGLE kind, one layer deep.

The layer reads the policy's states and the embedding of the next token, and predicts the one after it with the policy's output
layer. It is stored as DeepSeek-V3 stores its own, so training, export and engines need to know nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for

FIELD = "num_nextn_predict_layers"


def add_layer(source: str | Path, target: str | Path) -> None:
    """Write the model in `source` to the new folder `target`, with a layer that is a copy of its last one.

    The projection in front of it is the mean of embedding and state behind their norms, which leave both as they are.

    Raises:
        ModelError: the family can have no such layer, or the model has one.
    """
    folder = HFFolder(source)
    config = folder.config | {FIELD: 1}
    family = architecture_for(folder.config)
    if folder.config.get(FIELD) or family.weight_map(folder.config).has_prediction(folder.names):
        raise ModelError(f"'{source}' has a layer for multi-token prediction already; train it with policy.mtp.train")
    layer = family.weight_map(config).prediction
    number = folder.config.get("num_hidden_layers")
    hf_names = [name for rule in layer.rules for name in rule.hf_names] if layer is not None else []
    if not any(name.startswith(f"model.layers.{number}.") for name in hf_names):
        raise ModelError(f"'{source}' is of the family {family.name}, which can have no new layer for multi-token prediction")
    write_hf_folder(target, _tensors(folder, int(str(number))), config, extra_files_from=source)


def _tensors(folder: HFFolder, number: int) -> Iterator[tuple[str, Tensor]]:
    for name in folder.names:
        yield name, folder.get_slice(name)[:]
    last, new = f"model.layers.{number - 1}.", f"model.layers.{number}."
    for name in folder.names:
        if name.startswith(last):
            yield name.replace(last, new), folder.get_slice(name)[:].clone()
    norm = folder.get_slice("model.norm.weight")[:]
    half = torch.eye(len(norm), dtype=norm.dtype) / 2
    yield f"{new}enorm.weight", torch.ones_like(norm)
    yield f"{new}hnorm.weight", torch.ones_like(norm)
    yield f"{new}eh_proj.weight", torch.cat([half, half], dim=1)
    yield f"{new}shared_head.norm.weight", norm.clone()
