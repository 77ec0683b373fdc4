"""A parallel layout as a value: how many ranks each dimension has, and which rank sits where.

Pure arithmetic, importable without torch. The order of dimensions is megatron-core's default, `tp-cp-ep-dp-pp`: the
tensor-parallel neighbour is the next rank, the pipeline stage changes slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.errors import LayoutError, describe_value, either

MOST_LISTED = 8
"""Values that a sentence lists at most, if it can list all."""


@dataclass(frozen=True)
class Coords:
    """The coordinates of one rank. `ep`, `etp` and `edp` are its place in the expert layers' own decomposition."""

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
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "ep", "etp", "dp"):
            if getattr(self, name) < 1:
                raise self._refusal(name, allowed="at least 1")
        per_stage = self.tp * self.cp * self.dp
        if per_stage % (self.etp * self.ep):
            fit = [n for n in divisors(per_stage) if per_stage % (n * self.etp) == 0]
            field, other = ("ep", "etp") if fit else ("etp", "ep")
            raise self._refusal(
                field,
                f"times {other} = {getattr(self, other)} does not divide the {per_stage} ranks of a pipeline stage "
                f"(tp * cp * dp = {self.tp} * {self.cp} * {self.dp})",
                fit or divisors(per_stage),
                rule=f"times {other} does not divide the ranks of a pipeline stage",
            )
        if self.sequence_parallel and self.tp == 1:
            raise LayoutError.needs_set("sequence_parallel", "a tp of at least 2", "tp")
        for name in ("vpp", "first_stage_layers", "last_stage_layers"):
            if getattr(self, name) is not None and self.pp < 2:
                raise LayoutError.needs_set(name, "a pp of at least 2", "pp")
        if self.vpp is not None and self.vpp < 2:
            raise self._refusal("vpp", allowed="at least 2, or null for one chunk per stage")
        for name in ("first_stage_layers", "last_stage_layers"):
            layers = getattr(self, name)
            if layers is not None and (layers < 1 or layers % (self.vpp or 1)):
                raise self._refusal(name, allowed=f"a positive multiple of vpp = {self.vpp or 1}")

    def _refusal(
        self, field: str, reason: str = "", fit: Sequence[int] = (), *, allowed: str = "", rule: str = ""
    ) -> LayoutError:
        """The error about a size of this layout; `fit` are sizes in its place, of which the nearest are named."""
        value = getattr(self, field)
        return LayoutError.of(field, value, reason, allowed=allowed or (closest(fit, value) if fit else ""), rule=rule)

    @property
    def world_size(self) -> int:
        """Ranks of the whole role: tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Data-parallel replicas of the expert layers, which share out the optimizer state of experts (in megatron-core 0.16,
        where `ep` is 1: the dp * cp of a dense layer)."""
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

    def stage_layers(self, num_layers: int) -> list[list[list[int]]]:
        """The zero-based layers of each model chunk, `[pp][vpp or 1]`, as megatron-core assigns them.

        The first and the last stage hold what `first_stage_layers` and `last_stage_layers` say, the others equal shares;
        chunk v of every stage comes before chunk v + 1 of any.

        Raises:
            LayoutError: the layers cannot be shared so; the nearest sizes that can are named.
        """
        ends = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers}
        uneven = {stage: layers for stage, layers in ends.items() if layers is not None}
        even_stages, left = self.pp - len(uneven), num_layers - sum(uneven.values())
        chunks = self.vpp or 1
        fits = left % (even_stages * chunks) == 0 and left > 0 if even_stages else left == 0
        if not fits:
            raise self._stages_do_not_fit(num_layers)
        share = left // (even_stages * chunks) if even_stages else 0
        stages: list[list[list[int]]] = [[] for _ in range(self.pp)]
        at = 0
        for _ in range(chunks):
            for stage in range(self.pp):
                count = uneven[stage] // chunks if stage in uneven else share
                stages[stage].append(list(range(at, at + count)))
                at += count
        return stages

    def _stages_do_not_fit(self, num_layers: int) -> LayoutError:
        chunks, uneven = self.vpp or 1, self.uneven_ends(num_layers)
        times = f" times vpp = {self.vpp}" if self.vpp else ""
        if self.first_stage_layers is None and self.last_stage_layers is None:
            fit = [n for n in divisors(num_layers) if num_layers % (n * chunks) == 0 and (n > 1 or not self.vpp)]
            ends = f"set first_stage_layers and last_stage_layers to {uneven[0]} and {uneven[1]}" if uneven else ""
            ways = [closest(fit, self.pp)] if fit else [] if ends else [self._with_another_vpp(num_layers)]
            return self._refusal(
                "pp",
                f"{times} does not divide the model's {num_layers} layers".strip(),
                allowed=", or ".join([*ways, ends] if ends else ways),
                rule="does not divide the model's layers",
            )
        first, last = "first_stage_layers", "last_stage_layers"
        field, other = (first, last) if self.first_stage_layers is not None else (last, first)
        proposal = dict(zip((first, last), uneven, strict=True)) if uneven else {}
        return self._refusal(
            field,
            f"with {other} = {describe_value(getattr(self, other))} leaves no equal shares of the model's {num_layers} "
            f"layers to the other stages of pp = {self.pp}{times}",
            allowed=f"{proposal[field]}, with {other} = {proposal[other]}" if proposal else "",
            rule="leaves no equal shares of the layers to the other stages",
        )

    def _with_another_vpp(self, num_layers: int) -> str:
        """This pp with the nearest vpp that can share out the layers, or if none can, the nearest pp without one."""
        for chunks in sorted(range(1, num_layers // self.pp + 1), key=lambda size: (abs(size - (self.vpp or 1)), size)):
            other = replace(self, vpp=chunks if chunks > 1 else None)
            vpp = f"{self.pp} with vpp = {describe_value(other.vpp)}"
            if num_layers % (self.pp * chunks) == 0:
                return vpp
            if ends := other.uneven_ends(num_layers):
                return f"{vpp}, first_stage_layers = {ends[0]} and last_stage_layers = {ends[1]}"
        return f"{closest([n for n in divisors(num_layers) if n > 1], self.pp)} with vpp = null"

    def uneven_ends(self, num_layers: int) -> tuple[int, int] | None:
        """First and last stage sizes that fit, the last one at most as large as the first, as near to equal as can be."""
        chunks, middle = self.vpp or 1, self.pp - 2
        best: tuple[int, int] | None = None
        for first in range(chunks, num_layers, chunks):
            for last in range(chunks, first + 1, chunks):
                left = num_layers - first - last
                fits = left == 0 if not middle else left > 0 and left % (middle * chunks) == 0
                if fits and (best is None or _spread(num_layers, self.pp, (first, last)) < _spread(num_layers, self.pp, best)):
                    best = (first, last)
        return best

    def check_layer_spec(self, name: str) -> None:
        """Raise LayoutError where the layers that `model.layer_spec` = `name` asks for cannot be split this way."""
        field = "cp" if self.cp > 1 else "sequence_parallel" if self.sequence_parallel else None
        if name == "local" and field is not None:
            reason = "the layers of model.layer_spec = 'local' do not support"
            raise self._refusal(field, reason, allowed="1" if field == "cp" else "false")

    def check_model(
        self,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        ffn_size: int | None,
        num_experts: int | None = None,
        expert_ffn_size: int | None = None,
        deepstack: int = 0,
        linear_heads: int | None = None,
        linear_exchanges: bool = True,
    ) -> None:
        """Refuse a layout that cannot hold a model of these sizes, naming the nearest sizes that can.

        `ffn_size` is the width of dense layers and shared experts, None where there are none. Behind the first `deepstack`
        layers features of a vision tower are added, which is on the first stage. `linear_heads` are the heads of
        layers with states (linear attention, state spaces), None where no layer has any.

        Raises:
            LayoutError: tp does not divide the heads (or the KV heads in either direction) or the feed-forward width, cp the
                heads of layers with states on a tensor rank, the layers do not share among the stages or too few are in the
                first chunk, ep does not divide the experts, or etp an expert's width.
        """

        def holds(tp: int) -> bool:
            kv_heads_fit = num_kv_heads % tp == 0 or tp % num_kv_heads == 0
            return num_heads % tp == 0 and kv_heads_fit and (ffn_size or tp) % tp == 0 and (linear_heads or tp) % tp == 0

        if not holds(self.tp):
            sizes = [f"{num_heads} attention heads", f"{num_kv_heads} KV heads"]
            sizes += [f"{linear_heads} heads of layers with states"] if linear_heads else []
            sizes += [f"feed-forward width of {ffn_size}"] if ffn_size else []
            reason = f"does not divide the model's {', '.join(sizes[:-1])} and {sizes[-1]}"
            fit = [n for n in divisors(num_heads) if holds(n)]
            raise self._refusal("tp", reason, fit, rule="does not divide the model's heads and feed-forward width")
        if self.cp > 1 and not linear_exchanges:
            reason = "splits a sequence, whose states the layers of this model hand from token to token"
            raise self._refusal("cp", reason, allowed="1", rule="must be 1 for a model with such layers")
        if linear_heads is not None and linear_heads // self.tp % self.cp:
            heads = linear_heads // self.tp
            reason = f"does not divide the {heads} heads of layers with states that each of {self.tp} tensor ranks has"
            rule = "does not divide the heads of layers with states on a tensor rank"
            raise self._refusal("cp", reason, divisors(heads), rule=rule)
        first_chunk = self.stage_layers(num_layers)[0][0]
        if len(first_chunk) < deepstack:
            uneven, least = self.first_stage_layers is not None, deepstack * (self.vpp or 1)
            field = "first_stage_layers" if uneven else "vpp" if self.vpp is not None else "pp"
            raise self._refusal(
                field,
                f"leaves {len(first_chunk)} of the layers to the first model chunk, but the vision tower adds features behind "
                f"{deepstack}",
                allowed=f"at least {least}" if uneven else f"smaller, or first_stage_layers must be at least {least}",
                rule="leaves fewer layers to the first model chunk than features are added behind",
            )
        if num_experts is not None:
            self._check_experts(num_experts, expert_ffn_size)
        elif self.ep > 1:
            raise self._refusal("ep", "needs experts, and the model has none", allowed="1")

    def _check_experts(self, num_experts: int, expert_ffn_size: int | None) -> None:
        ranks = self.tp * self.cp * self.dp
        if num_experts % self.ep:
            fit = [n for n in divisors(num_experts) if ranks % (n * self.etp) == 0]
            reason = f"does not divide the model's {num_experts} experts"
            raise self._refusal("ep", reason, fit, rule="does not divide the model's experts")
        if expert_ffn_size is not None and expert_ffn_size % self.etp:
            fit = [n for n in divisors(expert_ffn_size) if ranks % (n * self.ep) == 0]
            rule = "does not divide an expert's feed-forward width"
            raise self._refusal("etp", f"{rule} of {expert_ffn_size}", fit, rule=rule)
        if self.tp > 1 and not self.sequence_parallel:
            reason = f"megatron-core cannot train experts with under tp = {self.tp}"
            rule = "must be true for experts under tensor parallelism"
            raise self._refusal("sequence_parallel", reason, allowed="true", rule=rule)
        if self.ep == 1 and self.etp != self.tp:
            reason = f"with tp = {self.tp} and ep = 1 gives wrong gradients of the experts in megatron-core 0.16, "
            reason += "and was not tried in 0.19"
            allowed, rule = f"{self.tp}, or set ep to more than 1", "differs from tp without expert parallelism"
            raise self._refusal("etp", reason, allowed=allowed, rule=rule)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def closest(values: Sequence[int], wanted: int) -> str:
    """All values, ascending, in words; of more than eight the four nearest to the one wanted, and that there are others."""
    if len(values) <= MOST_LISTED:
        return either(sorted(values))
    nearest_ones = sorted(sorted(values, key=lambda value: (abs(value - wanted), value))[:4])
    return f"{either(nearest_ones)}, among others"


def _spread(num_layers: int, pp: int, ends: tuple[int, int]) -> tuple[float, int]:
    """Distance of the stages from equal shares; ties go to the smaller first stage."""
    middle = (num_layers - sum(ends)) / (pp - 2) if pp > 2 else ends[0]
    sizes = (*ends, middle)
    return max(sizes) - min(sizes), ends[0]
