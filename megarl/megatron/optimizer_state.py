"""Adam's moments per parameter, whole, in the parameter's own sharding: a checkpoint that any layout can load.

megarl stores this itself because megatron-core 0.16's `fully_reshardable` format reads past the padding between gradient
buckets (tied embeddings under pipeline parallelism have two), and restores torch Adam's step as one tensor that all
parameters share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from megarl.megatron.shards import ShardBox, boxes_of, elements_of, is_tensor

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""`param` is the float32 master copy, which BF16 training cannot do without; float32 weights have none."""
MUON_KEY = "exp_avg"
"""Name of Muon's momentum: that of Adam's first moment. Parameters that Muon updates have no second one."""
BY_MUON = "is_updated_by_muon"
"""The attribute of these parameters."""


class OwnedSlice(NamedTuple):
    """The flat elements `place` of a parameter that this rank's optimizer owns: its float32 `main` copy and their group."""

    place: slice
    main: Tensor
    group: dict[str, Any]


def step_of(optimizer: Any) -> int:
    """Updates that Adam has done."""
    for adam in adams(optimizer):
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
    places = {id(entry.data): (state, name) for state in models.values() for name, entry in state.items() if is_tensor(entry)}
    boxes: list[ShardBox] = []
    for part, parameter in _parameters(optimizer):
        state, name = places[id(parameter)]
        sharded, in_fp8 = state[name], is_float8tensor(parameter)
        if not in_fp8:
            del state[name]
        owned = _owned(part, parameter)
        if owned is None or any(sharded.replica_id[:2]):  # the third is data-parallel, and those ranks share the work here
            continue
        flat_slice, tensors = owned
        if not in_fp8:
            boxes += boxes_of(sharded, parameter.detach().view(-1)[flat_slice], flat_slice.start)
        for key in _keys(parameter):
            if key == "param" and parameter.dtype == torch.float32:
                continue  # the weight itself
            of_key = replace(sharded, key=f"optimizer.{key}.{sharded.key}")
            # before the first update there are no moments: they are zero
            values = tensors[key].float() if key in tensors else torch.zeros(flat_slice.stop - flat_slice.start)
            boxes += boxes_of(of_key, values.flatten(), flat_slice.start)
    return boxes


def absent_elements(models: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """By key, how many elements of the tensors of moments nobody has, of the parameters that this rank speaks for."""
    elements_by_key: dict[str, int] = {}
    for entry in (entry for state in models.values() for entry in state.values() if is_tensor(entry)):
        if not isinstance(entry.data, torch.nn.Parameter) or not is_main_replica(entry.replica_id):
            continue
        for key in set(KEYS) - set(_keys(entry.data)) if entry.data.requires_grad else KEYS:
            for stored, elements in elements_of(replace(entry, key=f"optimizer.{key}.{entry.key}")):
                elements_by_key[stored] = elements_by_key.get(stored, 0) + elements
    return elements_by_key


def make_moments(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Have Adam make its moments, for a checkpoint to be read into; the weights change and must be read afterwards."""
    # Adam makes them in its first step, so this is one on zero gradients; everything it changes is read over.
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.step()
    optimizer.zero_grad()


def moment_boxes(optimizer: Any, models: Mapping[str, dict[str, Any]], *, has_masters: bool) -> Iterator[ShardBox]:
    """The places of the moments that this rank's optimizer owns, for a checkpoint to be read into.

    Without `has_masters` the checkpoint has float32 weights, which are their own master copies (`finish_moments`).
    """
    metadata = {id(entry.data): entry for state in models.values() for entry in state.values() if is_tensor(entry)}
    for part, parameter in _parameters(optimizer):
        owned = _owned(part, parameter)
        if owned is None:
            continue
        flat_slice, tensors = owned
        sharded = metadata[id(parameter)]
        for key in _keys(parameter) if has_masters else _keys(parameter)[1:]:
            of_key = replace(sharded, key=f"optimizer.{key}.{sharded.key}")
            yield from boxes_of(of_key, tensors[key].detach().view(-1), flat_slice.start)


@torch.no_grad()
def finish_moments(optimizer: Any, step: int, *, has_masters: bool) -> None:
    """Set what is in no box: Adam's count of updates and, without `has_masters`, the master copies. Call after the weights."""
    for part, parameter in _parameters(optimizer):
        owned = _owned(part, parameter)
        if owned is None:
            continue
        flat_slice, tensors = owned
        if not has_masters:
            tensors["param"].copy_(parameter.flatten()[flat_slice])
        if "step" in tensors:
            tensors["step"].fill_(step)
    for adam in adams(optimizer):
        for group in adam.param_groups:
            if "step" in group:  # Transformer Engine's and apex's Adam count per group
                group["step"] = step


def parts_of(optimizer: Any) -> list[Any]:
    """The distributed optimizers of dense and of expert parameters."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _parameters(optimizer: Any) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """(distributed optimizer, parameter) of every parameter of this rank's model, in the buffers' order."""
    for part in parts_of(optimizer):
        for buffer in part.buffers:
            for parameter in buffer.param_index_map:
                yield part, parameter


def owned_slice(part: Any, parameter: Tensor) -> OwnedSlice | None:
    """The slice of a parameter that this rank's distributed optimizer `part` owns; None if it owns nothing."""
    if parameter not in part.model_param_group_index_map:
        return None
    buffer_index, dtype, bucket_index = part.model_param_gbuf_map[parameter]
    owned = part.gbuf_ranges[buffer_index][dtype][bucket_index]["param_map"][parameter]["param"]
    number, order = part.model_param_group_index_map[parameter]
    group = part.optimizer.param_groups[number]
    return OwnedSlice(slice(owned.start, owned.end), group["params"][order], group)


def _owned(part: Any, parameter: torch.nn.Parameter) -> tuple[slice, dict[str, Tensor]] | None:
    """(the slice of the flat parameter that this rank's optimizer owns, its tensors by key); None if it owns nothing."""
    owned = owned_slice(part, parameter)
    if owned is None:
        return None
    # An offloading optimizer updates a float32 copy of its own, in main memory or on the device.
    main = getattr(part.optimizer, "param_to_inner_param", {}).get(owned.main, owned.main)
    return owned.place, {"param": main, **part.optimizer.state.get(owned.main, {})}


def _keys(parameter: Tensor) -> tuple[str, ...]:
    """The `KEYS` that a trained parameter has."""
    return tuple(key for key in KEYS if key != "exp_avg_sq" or not hasattr(parameter, BY_MUON))


def adams(optimizer: Any) -> Iterator[Any]:
    """The torch optimizers inside: an offloading one is several."""
    for part in parts_of(optimizer):
        yield from getattr(part.optimizer, "sub_optimizers", [part.optimizer])
