"""Reads boxes of a checkpoint that is spread over the memory of several nodes.

Of files of other nodes, what a rank asks for is first written to the same places of a file here, which has holes elsewhere.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megarl.megatron.box_reader import BoxReader

AT_ONCE = 16
"""Pieces that are asked for before the first has come."""


class FetchingReader(BoxReader):
    """A `BoxReader` of a folder in the memory of one node."""

    def __init__(self, folder: str, of: str, holder_of: Mapping[int, Any | None]) -> None:
        """`of`: the folder's path in a node's; `holder_of`: by rank the `NodeMemory` that has the file that it wrote, or None
        where that is here."""
        super().__init__(folder)
        self._of, self._holder_of, self._at = of, holder_of, Path(folder)
        self._places = self._reader.storage_data
        self._fetch_objects([f"rng/shard_{torch.distributed.get_rank()}_{torch.distributed.get_world_size()}"])

    def kept(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """See `BoxReader`; the entries are fetched first."""
        entries = super().kept(objects)
        self._fetch_objects([entry.unique_key for entry in entries.values()])
        return entries

    def _fetch_objects(self, keys: Iterable[str]) -> None:
        wanted = {*keys}
        self._fetch(index for index in self._places if index.fqn in wanted)

    def _fetch(self, indices: Iterable[MetadataIndex]) -> None:
        """Have these entries of files of other nodes here."""
        by_file: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for index in indices:
            place = self._places[index]
            by_file[place.relative_path].add((place.offset, place.length))
        for name, pieces in by_file.items():
            holder = self._holder_of[int(name.split("_")[2])]
            if holder is None:
                continue
            ordered = sorted(pieces)
            for start in range(0, len(ordered), AT_ONCE):
                asked = ordered[start : start + AT_ONCE]
                path = f"{self._of}/{name}"
                came = ray.get([holder.read.remote(path, offset, length) for offset, length in asked])
                descriptor = os.open(self._at / name, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    for (offset, _), content in zip(asked, came, strict=True):
                        os.pwrite(descriptor, content, offset)
                finally:
                    os.close(descriptor)
