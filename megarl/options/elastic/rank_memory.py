"""A rank's part of checkpoints in the nodes' memory: what the driver has its roles do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from megarl.megatron.rank_model import RankModel
    from megarl.options.elastic.shared_file import KeptPart, SharedFile

_files: WeakKeyDictionary[RankModel, dict[Path, SharedFile]] = WeakKeyDictionary()


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder in shared memory, and the Ray actor `NodeMemory` that owns it."""

    path: Path
    actor: Any


@dataclass(frozen=True)
class KeepInMemory:
    """Copy the rank's part of a role into a slot of its node's memory. No collective takes place."""

    role: str
    slot: str
    node: NodeFolder

    @property
    def __name__(self) -> str:
        """Name by which errors call it."""
        return "checkpoint in memory"

    def __call__(self, model: RankModel) -> KeptPart:
        """Do so; on return all of it is the node's, whatever becomes of this process."""
        import time

        from megarl.megatron.role_checkpoint import shards_of_role
        from megarl.options.elastic.shared_file import SharedFile

        began = time.thread_time()
        shards = shards_of_role(model)
        listed_s = time.thread_time() - began
        path = self.node.path / self.slot / self.role / f"__{shards.rank}_0.distcp"
        part = _files.setdefault(model, {}).setdefault(path, SharedFile(path)).write(shards)
        return replace(part, cpu_s=part.cpu_s + listed_s)


def bytes_in_memory(model: RankModel) -> int:
    """Bytes of the rank's part of a role in a checkpoint."""
    from megarl.megatron.role_checkpoint import shards_of_role

    return shards_of_role(model).nbytes


@dataclass(frozen=True)
class PutBack:
    """Read a role from a slot of the memory of the node `at`: what other nodes have is fetched from them.

    `having`: Ray's reference to a list, by rank that wrote, of the nodes that have its file, each with its `NodeMemory`.
    """

    role: str
    slot: str
    node: NodeFolder
    at: str
    having: Any

    @property
    def __name__(self) -> str:
        """Name by which errors call it."""
        return "state from memory"

    def __call__(self, model: RankModel) -> None:
        """Do so; collective over the world."""
        from functools import partial

        import ray

        from megarl.megatron.role_checkpoint import load_role
        from megarl.options.elastic.fetching_reader import FetchingReader

        of_ranks: list[Mapping[str, Any]] = ray.get(self.having)
        holder_of = {rank: None if self.at in nodes else next(iter(nodes.values())) for rank, nodes in enumerate(of_ranks)}
        folder = f"{self.slot}/{self.role}"
        load_role(model, str(self.node.path / folder), partial(FetchingReader, of=folder, holder_of=holder_of))
