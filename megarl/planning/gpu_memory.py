"""What was planned of the GPUs' memory: by kind of GPU and turn, who has how much."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.planning.gpus import GPUS_PER_NODE


@dataclass(frozen=True)
class GpuMemory:
    """The GPUs that hold the same, of which `first` is one: bytes in each turn by owner (a role, `engine`, `process`) and part.

    `host` are bytes in main memory for each of these GPUs.
    """

    first: int
    count: int
    turns: dict[str, dict[tuple[str, str], float]]
    host: float

    @property
    def fullest(self) -> str:
        """The turn in which most is there."""
        return max(self.turns, key=lambda turn: sum(self.turns[turn].values()))

    @property
    def parts(self) -> dict[tuple[str, str], float]:
        """What is there in the fullest turn."""
        return self.turns[self.fullest]

    @property
    def most(self) -> dict[tuple[str, str], float]:
        """The most of every part, in whichever turn it is there."""
        names = dict.fromkeys(name for parts in self.turns.values() for name in parts)
        return {name: max(parts.get(name, 0.0) for parts in self.turns.values()) for name in names}

    @property
    def total(self) -> float:
        """Bytes on each of these GPUs at the worst moment."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """All GPUs of a run, by what they hold. `kv_tokens` is what the engines' cache has room for, of `kv_wanted` at once."""

    gpus: tuple[GpuMemory, ...]
    usable: float
    kv_tokens: int
    kv_wanted: int
    moved_bytes: float = 0.0
    """Bytes that go to main memory and back in each step, of the GPU that moves most; 0 where nothing takes turns."""

    @property
    def worst(self) -> GpuMemory:
        """The fullest GPU."""
        return max(self.gpus, key=lambda gpu: gpu.total)

    @property
    def fits(self) -> bool:
        """Return whether every GPU holds what is on it."""
        return self.worst.total <= self.usable

    @property
    def host_bytes_of_a_node(self) -> float:
        """In main memory of a node whose GPUs are all like the one with most there."""
        return GPUS_PER_NODE * max(gpu.host for gpu in self.gpus)
