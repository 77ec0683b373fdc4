"""Weights in and out of a role's model through the architecture's weight map, shard by shard.

Layer numbers come from the layer objects. Loading reads only this rank's slices; exporting gathers one tensor at a
time over tensor parallelism to the rank that leads its pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.utils import unwrap_model
from torch import Tensor

from megarl.megatron.build import padded_vocab_size
from megarl.megatron.options import ModelOptions
from megarl.models.hf_folder import HFFolder
from megarl.models.weight_map import WeightMap

SCORE = "score.weight"
"""What Hugging Face calls the value head, `[1, H]`, of a sequence classifier with one label."""


def global_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name with the layer's global, zero-based index, parameter) of every parameter on this rank."""
    for chunk in chunks:
        core: Any = unwrap_model(chunk)
        layer_names = {
            f"decoder.layers.{place}.": f"decoder.layers.{layer.layer_number - 1}."
            for place, layer in enumerate(core.decoder.layers)
        }
        for name, parameter in core.named_parameters():
            prefix = ".".join(name.split(".")[:3]) + "."
            yield layer_names[prefix] + name[len(prefix) :] if prefix in layer_names else name, parameter


def load_weights(chunks: Sequence[torch.nn.Module], options: ModelOptions, folder: HFFolder, weight_map: WeightMap) -> None:
    """Fill every parameter from the Hugging Face folder; a value head keeps its zeros unless the folder is a reward model's.

    Also marks the parameters that tensor parallelism splits, which megatron-core does only as part of its own random
    initialisation: the gradient norm counts an unmarked parameter once instead of once per shard.

    Raises:
        ModelError: a tensor is missing or has the wrong shape.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in global_parameters(chunks):
            if _is_value_head(name, options):
                if SCORE in folder.names:
                    parameter.copy_(folder.get_slice(SCORE)[:])
                continue
            rule = weight_map.rule_for(name)
            shard = rule.shard_from_hf(folder.get_slice, tp_rank, options.layout.tp, _padded_vocab(folder, options))
            parameter.copy_(shard)
            if rule.tp_axis is not None and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, rule.tp_axis, 1)


def export_weights(
    chunks: Sequence[torch.nn.Module], options: ModelOptions, weight_map: WeightMap
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors of this pipeline stage, on its leading rank (tp 0, dp 0); other ranks iterate to nothing.

    Collective over tensor parallelism: every rank of data-parallel replica 0 must exhaust the iterator. A tied
    output layer is not exported again.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True):
        return
    group = parallel_state.get_tensor_model_parallel_group()
    size, rank = options.layout.tp, parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in global_parameters(chunks):
        if _is_value_head(name, options):
            if rank == 0:
                yield SCORE, parameter.detach()
            continue
        rule = weight_map.rule_for(name)
        if rule.tied_copy:
            continue
        local = parameter.detach()
        if size == 1 or rule.tp_axis is None:
            shards = [local]
        else:
            shards = [torch.empty_like(local) for _ in range(size)] if rank == 0 else []
            lead = torch.distributed.get_global_rank(group, 0)
            torch.distributed.gather(local.contiguous(), shards or None, dst=lead, group=group)
        if rank == 0:
            yield from rule.hf_from_shards(shards)


def _is_value_head(name: str, options: ModelOptions) -> bool:
    return options.head == "value" and name.startswith("output_layer.")


def _padded_vocab(folder: HFFolder, options: ModelOptions) -> int:
    return padded_vocab_size(folder.config["vocab_size"], options.layout.tp)
