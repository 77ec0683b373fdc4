"""A parallel layout as a value: how many ranks each dimension has, and which rank sits where.

Pure arithmetic, importable without torch. The order of dimensions is megatron-core's default, `tp-cp-ep-dp-pp`: the
tensor-parallel neighbour is the next rank, the pipeline stage changes slowest.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.errors import LayoutError


@dataclass(frozen=True)
class Coords:
    """Where one rank sits. `ep`, `etp` and `edp` are its place in the expert layers' own decomposition."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of a role's parallel dimensions. `dp` counts data-parallel replicas of the dense layers."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "etp", "dp"):
            size = getattr(self, name)
            if size < 1:
                raise LayoutError(f"layout.{name} is {size}, but a parallel size is at least 1")
        if self.world_size % (self.etp * self.ep * self.pp):
            raise LayoutError(
                f"layout.etp={self.etp} x layout.ep={self.ep} x layout.pp={self.pp} does not divide the "
                f"{self.world_size} ranks of tp*cp*dp*pp={self.tp}*{self.cp}*{self.dp}*{self.pp}"
            )
        if self.sequence_parallel and self.tp == 1:
            raise LayoutError("layout.sequence_parallel is true, but it needs layout.tp of at least 2")
        if self.vpp is not None and (self.vpp < 2 or self.pp < 2):
            raise LayoutError(f"layout.vpp is {self.vpp}, but it needs to be at least 2 with layout.pp of at least 2")

    @property
    def world_size(self) -> int:
        """Ranks of the whole role: tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the dense layers: tp * cp * pp."""
        return self.tp * self.cp * self.pp

    @property
    def edp(self) -> int:
        """Data-parallel replicas of the expert layers."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def coords(self, rank: int) -> Coords:
        """Coordinates of `rank` in 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside the layout's 0..{self.world_size - 1}")
        within_stage = rank % (self.tp * self.cp * self.dp)
        return Coords(
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // (self.tp * self.cp * self.dp),
            etp=within_stage % self.etp,
            ep=within_stage // self.etp % self.ep,
            edp=within_stage // (self.etp * self.ep),
        )

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Rank at the given dense coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def check_model(self, *, num_layers: int, num_heads: int, num_kv_heads: int, num_experts: int | None) -> None:
        """Refuse a layout that cannot hold a model of these sizes, naming the nearest sizes that can.

        Raises:
            LayoutError: tp does not divide the heads (or the KV heads in either direction), pp the layers, or ep
                the experts.
        """
        if num_heads % self.tp or (num_kv_heads % self.tp and self.tp % num_kv_heads):
            fit = [n for n in divisors(num_heads) if num_kv_heads % n == 0 or n % num_kv_heads == 0]
            raise LayoutError(
                f"layout.tp is {self.tp}, but the model has {num_heads} attention heads and {num_kv_heads} KV heads; "
                f"tp may be {_listed(fit)}"
            )
        stages = self.pp * (self.vpp or 1)
        if num_layers % stages:
            raise LayoutError(
                f"layout.pp{' x layout.vpp' if self.vpp else ''} is {stages}, but the model has {num_layers} layers; "
                f"the number of stages may be {_listed(divisors(num_layers))}"
            )
        if self.ep > 1 and num_experts is None:
            raise LayoutError(f"layout.ep is {self.ep}, but the model has no experts; ep may be 1")
        if num_experts is not None and num_experts % self.ep:
            raise LayoutError(
                f"layout.ep is {self.ep}, but the model has {num_experts} experts; ep may be {_listed(divisors(num_experts))}"
            )


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")
