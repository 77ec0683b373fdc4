"""The training ranks as owners of weights: the ranks of one model replica as numbered sources, and their data-parallel
replicas.

A source is a place in the model that several ranks hold: for the dense layers a pipeline stage and a tensor-parallel rank, held
once per data- and context-parallel replica; for the experts a stage, an expert-parallel and an expert-tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megarl.config.layout import Layout
from megarl.models.packings import Vocabulary
from megarl.models.weight_map import Rule
from megarl.weights.tensors import Ints


@dataclass(frozen=True)
class Sources:
    """The sources of a layout, dense ones first: number `stage * slots + slot`, where slots are `tp`, or `etp * ep`."""

    layout: Layout
    num_layers: int
    num_experts: int

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def num_dense(self) -> int:
        """Number of sources of dense layers."""
        return self.layout.pp * self.layout.tp

    @cached_property
    def stage(self) -> Ints:
        """The pipeline stage of each source."""
        return self._per_source(lambda slots: np.repeat(np.arange(self.layout.pp), slots))

    @cached_property
    def slot(self) -> Ints:
        """The place of each source within its stage."""
        return self._per_source(lambda slots: np.tile(np.arange(slots), self.layout.pp))

    @cached_property
    def replicas(self) -> Ints:
        """Number of ranks that hold what a source holds."""
        return self._per_source(lambda slots: np.full(self.layout.pp * slots, self._ranks_of_stage // slots))

    @cached_property
    def stage_of_layer(self) -> Ints:
        """The pipeline stage of each layer."""
        stages = np.zeros(self.num_layers, np.int64)
        for stage, chunks in enumerate(self.layout.stage_layers(self.num_layers)):
            for layers in chunks:
                stages[layers] = stage
        return stages

    def number(self, rule: Rule, stage: Ints, expert: Ints, slot: Ints) -> Ints:
        """The sources that hold shard `slot` of parameters of `rule`, in these stages and of these experts."""
        if not rule.is_expert:
            return stage * self.layout.tp + slot
        group = expert // (self.num_experts // self.layout.ep)
        return self.num_dense + stage * self._expert_slots + group * self.layout.etp + slot

    def rank(self, source: Ints, replica: Ints) -> Ints:
        """The rank that is the `replica`-th of a source, of each of them."""
        return self._first_rank[source] + self._ranks_of_stage // self.replicas[source] * replica

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """(source, replica) of what a rank holds: of the experts if there are any, and of the dense layers."""
        stage, within = divmod(rank, self._ranks_of_stage)
        replica, slot = divmod(within, self.layout.tp)
        sources = [(stage * self.layout.tp + slot, replica)]
        if self.num_experts:
            replica, slot = divmod(within, self._expert_slots)
            sources.insert(0, (self.num_dense + stage * self._expert_slots + slot, replica))
        return sources

    @property
    def _ranks_of_stage(self) -> int:
        return self.layout.world_size // self.layout.pp

    @property
    def _expert_slots(self) -> int:
        return self.layout.etp * self.layout.ep

    @cached_property
    def _first_rank(self) -> Ints:
        return self.stage * self._ranks_of_stage + self.slot

    def _per_source(self, of_slots: Callable[[int], Ints]) -> Ints:
        kinds = (self.layout.tp, self._expert_slots) if self.num_experts else (self.layout.tp,)
        return np.concatenate([of_slots(slots) for slots in kinds])


def shard_runs(rule: Rule, layout: Layout, padded_vocab: int) -> list[tuple[int, int, int, int, int]]:
    """(slot, part, start, stop, offset): `start:stop` of the rule's `part`-th tensor lies at `offset` in the shard of `slot`.

    Along the axis that is split; a parameter that is not split is whole in the shard of every slot.

    Raises:
        LayoutError: the layout does not divide the parameter.
    """
    size = layout.etp if rule.is_expert else layout.tp
    padded = padded_vocab if isinstance(rule.packing, Vocabulary) else None
    runs = []
    for slot in range(size):
        offset = 0
        for part, start, stop in rule.packing.runs(slot, size, padded):
            if part is not None and stop > start:
                runs.append((slot, part, start, stop, offset))
            offset += stop - start
    return runs
