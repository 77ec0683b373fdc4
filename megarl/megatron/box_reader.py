"""Boxes of a checkpoint's tensors, read straight into their places: only one stored piece is in memory at once.

megatron-core's own loading wants a whole tensor of every sharded one, on every data-parallel rank.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megarl.errors import CheckpointError
from megarl.megatron.shards import ShardBox, boxes_of, is_tensor, plain

_IS_EXTRA_STATE = re.compile(r"\._extra_state\d*$")
_OF_MOMENTS = re.compile(r"^optimizer\.\w+\.")
_WAS_FROZEN = (
    "what is trained was frozen when it was written; freeze it again, or begin a new run from an export of its weights"
)


class BoxReader:
    """A checkpoint in torch's distributed format, whose table of contents is read once."""

    def __init__(self, folder: str) -> None:
        self._folder, self._reader = folder, FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._contents = metadata.state_dict_metadata
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)

    def has(self, prefix: str) -> bool:
        """Return whether there is a tensor whose key begins with `prefix`."""
        return any(key.startswith(prefix) for key in self._contents)

    def kept(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a model that are no tensors and that the checkpoint has.

        Transformer Engine's layers have one each, the state of delayed FP8 scaling; a checkpoint of other layers has none.

        Raises:
            CheckpointError: the checkpoint lacks an entry of another kind.
        """
        kept_entries = {name: entry for name, entry in objects.items() if entry.unique_key in self._contents}
        for name, entry in objects.items():
            if name not in kept_entries and not _IS_EXTRA_STATE.search(entry.key):
                raise CheckpointError(f"'{self._folder}' has no '{entry.key}': it is a checkpoint of another model or role")
        return kept_entries

    @torch.no_grad()
    def read(self, boxes: Iterable[ShardBox]) -> None:
        """Fill the `data` of every box with the checkpoint's values; no collective takes place.

        Raises:
            CheckpointError: the checkpoint has no such tensor, one of another shape, or not these boxes of it.
        """
        by_key: dict[str, list[ShardBox]] = defaultdict(list)
        for box in boxes:
            by_key[box.key].append(box)
        items: list[ReadItem] = []
        for key, of_key in by_key.items():
            stored = self._stored(key, of_key[0])
            if tuple(stored.size) != of_key[0].global_shape:  # padding that the checkpoint lacks is zero
                for box in of_key:
                    box.data.zero_()
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in of_key]
            read_items = create_read_items_for_chunk_list(key, stored, chunks)
            if sum(prod(chunk.sizes) for chunk in stored.chunks) < prod(stored.size):
                self._check_covered(key, sum(prod(item.lengths) for item in read_items), sum(prod(box.sizes) for box in of_key))
            items += read_items
        self._fetch(item.storage_index for item in items)
        self._reader.read_data(LoadPlan(items), _IntoBoxes(by_key)).wait()

    def _fetch(self, indices: Iterable[MetadataIndex]) -> None:
        """Have these entries where they can be read, if they are elsewhere."""

    def _check_covered(self, key: str, found: int, wanted: int) -> None:
        """Refuse a tensor that lacks elements that are asked for; moments are not whole if parameters were frozen."""
        if found < wanted:
            raise CheckpointError(f"'{self._folder}' has {found} of {wanted} elements of '{key}': {_WAS_FROZEN}")

    def _stored(self, key: str, box: ShardBox) -> TensorStorageMetadata:
        stored = self._contents.get(key)
        if not isinstance(stored, TensorStorageMetadata):
            if (weight := _OF_MOMENTS.sub("", key)) != key and weight in self._contents:
                raise CheckpointError(f"'{self._folder}' has no tensor '{key}': {_WAS_FROZEN}")
            raise CheckpointError(f"'{self._folder}' has no tensor '{key}': it is a checkpoint of another model or role")
        if _without(stored.size, box.padded_axis) != _without(box.global_shape, box.padded_axis):
            raise CheckpointError(
                f"'{self._folder}' has '{key}' of shape {list(stored.size)}, and this model of {list(box.global_shape)}"
            )
        return stored


def read_weights(reader: BoxReader, models: Mapping[str, dict[str, Any]]) -> None:
    """Read the tensors of a model's sharded states, by name, into the model; weights in FP8 one at a time."""
    entries = [entry for state in models.values() for entry in state.values() if is_tensor(entry)]
    in_place = (entry for entry in entries if not is_float8tensor(entry.data))
    reader.read(box for entry in in_place for box in boxes_of(entry, entry.data.detach().view(-1), 0))
    for entry in entries:
        if is_float8tensor(entry.data):
            values = plain(entry.data).contiguous()
            reader.read(boxes_of(entry, values.view(-1), 0))
            with torch.no_grad():
                entry.data.copy_(values)


def _without(shape: Sequence[int], axis: int | None) -> list[int]:
    return [size for number, size in enumerate(shape) if number != axis]


class _IntoBoxes(LoadPlanner):
    """Tells torch's reader where each value goes."""

    def __init__(self, boxes: dict[str, list[ShardBox]]) -> None:
        self._boxes = boxes

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        box = self._boxes[read_item.dest_index.fqn][read_item.dest_index.index]
        target = box.data.view(box.sizes)
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: `tensor` is the place itself."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("boxes are tensors")

    def set_up_planner(self, *unused: object, **also_unused: object) -> None:
        raise NotImplementedError("the plan is made in this file")

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made in this file")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError("the plan is made in this file")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError("the plan is made in this file")
