"""A role as a Hugging Face model folder, written by rank 0 while the pipeline stages hand it one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megarl.megatron.rank_model import RankModel
from megarl.models.hf_fields import without_mxfp4, without_prediction_layers
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for, sequence_classifier


def write_role(role: RankModel, folder: str) -> None:
    """Write `role` to `folder`, whole or not at all; collective over the world of its layout.

    Config, tokenizer and chat template are those of the folder the role came from. A role with a value head becomes a
    sequence classifier with one label.

    Raises:
        ModelError: `folder` exists already.
    """
    layout, rank = role.options.layout, torch.distributed.get_rank()
    coords = layout.coords(rank)
    if rank == 0:
        write_hf_folder(folder, _all_stages(role), _config(role), extra_files_from=role.options.path)
    else:
        for name, tensor in role.export():
            tensor = tensor.contiguous()
            torch.distributed.send_object_list([(name, tensor.shape, tensor.dtype)], dst=0)
            torch.distributed.send(tensor, dst=0)
        if rank == layout.rank(pp=coords.pp):
            torch.distributed.send_object_list([None], dst=0)
    torch.distributed.barrier()


def _all_stages(role: RankModel) -> Iterator[tuple[str, Tensor]]:
    """On rank 0: the tensors of stage 0, then those that the leading ranks of the later stages send."""
    yield from role.export()
    layout = role.options.layout
    for stage in range(1, layout.pp):
        source = layout.rank(pp=stage)
        while True:
            header: list[Any] = [None]
            torch.distributed.recv_object_list(header, src=source)
            if header[0] is None:
                break
            name, shape, dtype = header[0]
            tensor = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            torch.distributed.recv(tensor, src=source)
            yield name, tensor


def _config(role: RankModel) -> dict[str, Any]:
    """The `config.json` of the folder that the role came from, changed where the role differs from it."""
    config = without_mxfp4(without_prediction_layers(HFFolder(role.options.path).config))
    config.pop("torch_dtype", None)
    config["dtype"] = role.options.dtype
    if role.options.head == "value":
        return sequence_classifier(config)
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures", [])):
        config["architectures"] = [architecture_for(config).hf_classes[0]]
    return config
