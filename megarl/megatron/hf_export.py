"""A role as a Hugging Face model folder, written by rank 0 while the pipeline stages hand it one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megarl.megatron.model_config import DTYPES
from megarl.megatron.rank_model import RankModel
from megarl.models.adapters import adapter_part
from megarl.models.hf_fields import without_mxfp4, without_prediction_layers, without_tied_output
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.models.registry import architecture_for, sequence_classifier


def write_role(role: RankModel, folder: str, *, adapters: bool = False) -> None:
    """Write `role` to `folder`, whole or not at all; collective over the world of its layout.

    Config, tokenizer and chat template are those of the folder the role came from, but for the template that a run has used
    in its place. A role with a value head becomes a
    sequence classifier with one label. With `adapters` these alone are written, as a PEFT folder; else they are merged in.

    Raises:
        ModelError: `folder` exists already.
    """
    layout, rank = role.options.layout, torch.distributed.get_rank()
    coords = layout.coords(rank)
    if rank == 0:
        source = HFFolder(role.options.path)
        if adapters:
            assert role.options.lora is not None, "only a role that has adapters is written so"
            adapter_part("peft_folder").write_peft_folder(
                folder,
                _all_stages(role, role.export_adapters),
                role.options.lora,
                base=role.options.path,
                hf_config=source.config,
                template=role.options.chat_template,
            )
        else:
            tensors = chain(_with_copies(_all_stages(role, role.export), _copies(role, source)), _untrained(role, source))
            config, template = _config(role, source), role.options.chat_template
            write_hf_folder(folder, tensors, config, extra_files_from=role.options.path, template=template)
    else:
        for name, tensor in (role.export_adapters if adapters else role.export)():
            tensor = tensor.contiguous()
            torch.distributed.send_object_list([(name, tensor.shape, tensor.dtype)], dst=0)
            torch.distributed.send(tensor, dst=0)
        if rank == layout.rank(pp=coords.pp):
            torch.distributed.send_object_list([None], dst=0)
    torch.distributed.barrier()


def _all_stages(role: RankModel, export: Callable[[], Iterator[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    """On rank 0: the tensors that `export` gives of stage 0, then those that the leading ranks of the later stages send."""
    yield from export()
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


def _copies(role: RankModel, source: HFFolder) -> dict[str, list[str]]:
    """By tensor the names under which the export has it again, with the layer for multi-token prediction."""
    layer, pairs = role.weight_map.prediction, role.weight_map.copies
    if layer is not None and role.options.head == "log_probs":  # which is not trained
        pairs = tuple((copy, original) for copy, original in layer.copies if copy in source.names)
    copies: dict[str, list[str]] = {}
    for copy, original in pairs:
        copies.setdefault(original, []).append(copy)
    return copies


def _with_copies(tensors: Iterable[tuple[str, Tensor]], copies: dict[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        yield from ((copy, tensor.clone()) for copy in copies.get(name, ()))


def _untrained(role: RankModel, source: HFFolder) -> Iterator[tuple[str, Tensor]]:
    """Layers for multi-token prediction that the role does not train, as its folder has them, in the role's dtype."""
    if role.options.head == "value" or role.options.prediction is not None:
        return
    layer = role.weight_map.prediction
    copies = {copy for copy, _ in layer.copies} if layer is not None else {*()}
    own_dtype = {name for rule in role.weight_map.with_prediction().bound_rules() if rule.dtype for name in rule.hf_names}
    for name in source.names:
        if role.weight_map.leaves_out(name) and name not in copies:
            tensor = source.get_slice(name)[...]
            yield name, tensor if name in own_dtype else tensor.to(DTYPES[role.options.dtype])


def _config(role: RankModel, source: HFFolder) -> dict[str, Any]:
    """The `config.json` of the folder that the role came from, changed where the role differs from it."""
    predicts = role.options.prediction is not None or any(map(role.weight_map.leaves_out, source.names))
    config = without_mxfp4(source.config)
    if not predicts or role.options.head == "value":
        config = without_prediction_layers(config)
    config = dict(config)
    config.pop("torch_dtype", None)
    config["dtype"] = role.options.dtype
    if role.options.lora is not None and adapter_part("weight_map").unties(role.weight_map):
        config = without_tied_output(config)
    if role.options.head == "value":
        return sequence_classifier(config)
    if any(name.endswith("ForSequenceClassification") for name in config.get("architectures", [])):
        config["architectures"] = [architecture_for(config).hf_classes[0]]
    return config
