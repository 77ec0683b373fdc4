"""Adam's moments per parameter, whole, in the parameter's own sharding: a checkpoint that any layout can load.

megarl stores this itself because megatron-core 0.16's `fully_reshardable` format reads past the padding between gradient
buckets (tied embeddings under pipeline parallelism have two), and restores torch Adam's step as one tensor that all
parameters share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megarl.megatron.shards import ShardBox, boxes_of

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""`param` is the float32 master copy, which BF16 training cannot do without; float32 weights have none."""


def step_of(optimizer: Any) -> int:
    """Updates that Adam has done."""
    for adam in _adams(optimizer):
        for state in adam.state.values():
            if "step" in state:
                return int(state["step"])
        for group in adam.param_groups:
            if "step" in group:
                return int(group["step"])
    return 0


@torch.no_grad()
def owned_boxes(optimizer: Any, models: Mapping[str, dict[str, Any]]) -> list[ShardBox]:
    """Weights and moments of the slices that this rank's optimizer owns.

    `models` are the model's sharded states by name; weights that the data-parallel ranks contribute in this way are taken
    out of them. The moments of a tensor are stored under `optimizer.<key>.<its key>`.
    """
    places = {id(entry.data): (state, name) for state in models.values() for name, entry in state.items() if _is_tensor(entry)}
    boxes: list[ShardBox] = []
    for part, parameter in _parameters(optimizer):
        state, name = places[id(parameter)]
        sharded, in_fp8 = state[name], is_float8tensor(parameter)
        if not in_fp8:
            del state[name]
        owned = _owned(part, parameter)
        if owned is None or any(sharded.replica_id[:2]):  # the third is data-parallel, and those ranks share the work here
            continue
        place, tensors = owned
        if not in_fp8:
            boxes += boxes_of(sharded, parameter.detach().view(-1)[place], place.start)
        for key in KEYS:
            if key == "param" and parameter.dtype == torch.float32:
                continue  # the weight itself
            of_key = replace(sharded, key=f"optimizer.{key}.{sharded.key}")
            # before the first update there are no moments: they are zero
            values = tensors[key].float() if key in tensors else torch.zeros(place.stop - place.start)
            boxes += boxes_of(of_key, values.flatten(), place.start)
    return boxes


def sharded_moments(optimizer: Any, models: Mapping[str, dict[str, Any]], *, has_masters: bool) -> dict[str, Any]:
    """`{"step": int, "<number of the parameter>.<key>": sharded tensor}`: empty places for a checkpoint to be loaded into.

    Without `has_masters` the checkpoint has float32 weights, which are their own master copies.
    """
    metadata = {id(entry.data): entry for state in models.values() for entry in state.values() if _is_tensor(entry)}
    state: dict[str, Any] = {"step": 0}
    keys = KEYS if has_masters else KEYS[1:]
    for number, (_, parameter) in enumerate(_parameters(optimizer)):
        sharded = metadata[id(parameter)]
        whole = torch.zeros(len(keys), parameter.numel(), device=parameter.device)
        for row, key in enumerate(keys):
            changes: dict[str, Any] = {"key": f"optimizer.{key}.{sharded.key}", "data": whole[row].view(parameter.shape)}
            if not isinstance(sharded, ShardedTensorFactory):
                changes["dtype"] = torch.float32
            state[f"{number}.{key}"] = replace(sharded, **changes)
    return state


def load_moments(optimizer: Any, chunks: Sequence[Any], state: dict[str, Any]) -> None:
    """Put loaded moments into the optimizer: each rank takes the slices it owns. Call after the model's own weights."""
    # Adam makes its moments in its first step, so one on zero gradients comes first; everything it changes is loaded over.
    weights = [parameter.detach().clone() for _, parameter in _parameters(optimizer)]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    with torch.no_grad():
        for number, (part, parameter) in enumerate(_parameters(optimizer)):
            parameter.copy_(weights[number])
            owned = _owned(part, parameter)
            if owned is None:
                continue
            place, tensors = owned
            for key in KEYS:
                loaded = state.get(f"{number}.{key}", parameter)  # without master copies, the weight
                tensors[key].copy_(loaded.flatten()[place])
            if "step" in tensors:
                tensors["step"].fill_(state["step"])
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            if "step" in group:  # Transformer Engine's and apex's Adam count per group
                group["step"] = state["step"]


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def _parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _parameters(optimizer: Any) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """(distributed optimizer, parameter) of every parameter of this rank's model, in the buffers' order."""
    for part in _parts(optimizer):
        for buffer in part.buffers:
            for parameter in buffer.param_index_map:
                yield part, parameter


def _owned(part: Any, parameter: torch.nn.Parameter) -> tuple[slice, dict[str, Tensor]] | None:
    """(the slice of the flat parameter that this rank's optimizer owns, its tensors by key); None if it owns nothing."""
    if parameter not in part.model_param_group_index_map:
        return None
    buffer_index, dtype, bucket_index = part.model_param_gbuf_map[parameter]
    owned = part.gbuf_ranges[buffer_index][dtype][bucket_index]["param_map"][parameter]["param"]
    group, order = part.model_param_group_index_map[parameter]
    shard = part.optimizer.param_groups[group]["params"][order]
    # An offloading optimizer updates a float32 copy of its own, in main memory or on the device.
    main = getattr(part.optimizer, "param_to_inner_param", {}).get(shard, shard)
    return slice(owned.start, owned.end), {"param": main, **part.optimizer.state.get(shard, {})}


def _adams(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside: an offloading one is several."""
    for part in _parts(optimizer):
        yield from getattr(part.optimizer, "sub_optimizers", [part.optimizer])
