"""The reshard plan: which training rank sends which boxes of which tensors to which rank of which engine, in which buckets.

Pure data made from a weight map, a training layout and a target. One engine's transfers are a template (`template.py`) of rows
that name a *source*, a place in the model (`sources.py`); which of a source's data-parallel replicas sends which bucket to
which engine is arithmetic, done when it is asked for. So the plan of 16,384 ranks is no larger than that of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megarl.config.layout import Layout
from megarl.models.adapters import AdapterSpec
from megarl.models.architecture import HFConfig
from megarl.models.packings import padded_vocab
from megarl.models.registry import architecture_for
from megarl.models.weight_formats import WeightFormat
from megarl.models.weight_map import WeightMap
from megarl.weights.engine_line import engine_position
from megarl.weights.sglang_targets import EVERY_RANK, EngineTarget, check_target
from megarl.weights.slices import Slices, engine_slices
from megarl.weights.sources import Sources
from megarl.weights.template import Transfers, engine_transfers
from megarl.weights.tensors import Ints, TensorTable

BUCKET_BYTES = 64 * 2**20
"""Bytes for one rank of an engine that are sent at once, at most."""
LOAD_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""By platform what a training rank of a run stages at once, at most: a bucket for each of up to `RANKS_PER_LOAD` ranks of an
engine. The same for all ranks of a run, and for the planner.

Every load is a message to each rank that it is for and an answer, so smaller ones cost more. Through shared memory 128 MiB
take longer than that. A GPU copies them in a tenth of a millisecond: 1 GiB there is an estimate, not measured.
"""
RANKS_PER_LOAD = 16


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy: `source[source_row:+rows, source_col:+cols]` to `target[target_row:+rows, target_col:+cols]`.

    `source` is this rank's shard of `parameter` and `target` what `engine_rank` holds of `tensor`, as matrices (a tensor of
    one axis has one column). `row, col` is where the box lies in the whole Hugging Face tensor. `engine_rank` is -1
    (`EVERY_RANK`) of what all ranks of the engine take alike.
    """

    tensor: str
    parameter: str
    engine_rank: int
    row: int
    col: int
    rows: int
    cols: int
    source_row: int
    source_col: int
    target_row: int
    target_col: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TransferBucket:
    """Transfers `start:stop` of the template, staged once by `rank` and sent to one rank of `engines`, in this order.

    `number` is the same for all replicas of `source`; an engine takes every number once. `engine_rank` may be `EVERY_RANK`.
    """

    number: int
    source: int
    rank: int
    engines: tuple[int, ...]
    engine_rank: int
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class ReshardPlan:
    """Made by `plan_reshard`. `bucket_starts` has one entry per bucket and the number of all transfers at the end."""

    weight_map: WeightMap = field(repr=False)
    layout: Layout
    target: EngineTarget
    padded_vocab: int
    bucket_bytes: int
    tensors: TensorTable = field(repr=False)
    sources: Sources = field(repr=False)
    transfers: Transfers = field(repr=False)
    bucket_starts: Ints = field(repr=False)

    @property
    def load_bytes(self) -> int:
        """Bytes that a training rank stages at once, at most."""
        return self.bucket_bytes * min(self.target.ranks, RANKS_PER_LOAD)

    # what is moved ------------------------------------------------------------------------------------------------

    def contents(self, bucket: TransferBucket) -> list[Transfer]:
        """The copies in a bucket, in the order of tensors."""
        return self._transfers(slice(bucket.start, bucket.stop))

    def transfer(self, row: int) -> Transfer:
        """One row of the template."""
        return self._transfers(slice(row, row + 1))[0]

    def _transfers(self, rows: slice) -> list[Transfer]:
        t, names, parameters = self.transfers, self.tensors.names, self.tensors.parameters
        columns = (
            t.engine_rank, t.row, t.col, t.rows, t.cols, t.source_row, t.source_col, t.target_row, t.target_col, t.nbytes,
        )  # fmt: skip
        numbers = zip(t.tensor[rows].tolist(), *(column[rows].tolist() for column in columns), strict=True)
        return [Transfer(names[tensor], parameters[tensor], *rest) for tensor, *rest in numbers]

    def slices(self, engine_rank: int) -> dict[str, tuple[int, int, int, int]]:
        """The slices that a rank of an engine receives: name -> (row, rows, col, cols) of the whole tensor, without
        vocabulary padding."""
        slices = self.all_slices
        boxes = {}
        for at in np.flatnonzero(_is_for(slices.engine_rank, engine_rank)).tolist():
            box = (int(slices.row[at]), int(slices.rows[at]), int(slices.col[at]), int(slices.cols[at]))
            boxes[self.tensors.names[slices.tensor[at]]] = box
        return boxes

    @property
    def taken_whole(self) -> list[str]:
        """The tensors that every rank of an engine is sent whole although it holds no more than a part of them."""
        whole_parts = set()
        for number, rule in enumerate(self.tensors.rules):
            for part in range(len(rule.hf_names)):
                if self.target.takes_whole(rule) and self.target.holds_part(rule, part):
                    whole_parts.add((number, part))
        where = zip(self.tensors.rule.tolist(), self.tensors.part.tolist(), strict=True)
        return [self.tensors.names[tensor] for tensor, kind in enumerate(where) if kind in whole_parts]

    @cached_property
    def received_bytes(self) -> Ints:
        """Bytes that each rank of an engine receives."""
        of_each, ranks = self.transfers.nbytes, self.target.ranks
        by_rank = np.bincount(self.transfers.engine_rank - EVERY_RANK, weights=of_each, minlength=ranks - EVERY_RANK)
        return (by_rank[-EVERY_RANK:] + by_rank[0]).astype(np.int64)

    @cached_property
    def own_bytes(self) -> int:
        """Bytes of what all ranks of one engine hold, without vocabulary padding."""
        slices = engine_slices(self.tensors, replace(self.target, whole="none"), self.weight_map.num_experts)
        return int((slices.rows * slices.cols * self.tensors.itemsize[slices.tensor]).sum())

    @cached_property
    def all_slices(self) -> Slices:
        """The slices that all ranks of an engine receive, as columns."""
        return engine_slices(self.tensors, self.target, self.weight_map.num_experts)

    # who moves it -------------------------------------------------------------------------------------------------

    def sends(self, rank: int) -> Iterator[TransferBucket]:
        """The buckets that a training rank stages, in order, each with the engines that it sends it to.

        The stages begin at different ranks of different engines, so that no link waits for another: sent one after another, to
        ranks that take one at a time, buckets arrive nearly as soon as the busiest link allows (`tests/weights/test_order.py`).
        """
        for source, replica in self.sources.of_rank(rank):
            first, engines, sent = self.assignment(source, replica)
            stage, slot = int(self.sources.stage[source]), int(self.sources.slot[source])
            numbers = np.flatnonzero(sent.any(axis=1)).tolist()
            begin = stage * len(numbers) // self.layout.pp
            for number in (*numbers[begin:], *numbers[:begin]):
                to = engines[sent[number]].tolist()
                turn = (stage + slot * self.layout.pp) % len(to)
                yield self.bucket(first + number, rank, (*to[turn:], *to[:turn]))

    def receives(self, engine: int, engine_rank: int) -> Iterator[TransferBucket]:
        """The buckets with something for a rank of an engine, each once, with the training rank that sends it."""
        has = np.flatnonzero(_is_for(self.bucket_engine_rank, engine_rank))
        for bucket, rank in zip(has.tolist(), self.sender(np.array(engine), has).tolist(), strict=True):
            yield self.bucket(bucket, rank, (engine,))

    def sender(self, engine: Ints, bucket: Ints) -> Ints:
        """The rank that sends each of these buckets to these engines."""
        return self.sources.rank(self.bucket_source[bucket], self.replica(engine, bucket))

    def senders(self, engine: int) -> list[int]:
        """The training ranks that send something to an engine."""
        buckets = np.arange(len(self.bucket_starts) - 1)
        return [int(rank) for rank in np.unique(self.sender(np.array(engine), buckets))]

    def assignment(self, source: int, replica: int) -> tuple[int, Ints, npt.NDArray[np.bool_]]:
        """(first bucket of a source, engines that a replica may serve, `[buckets, engines]` whether it sends it there)."""
        first, stop = self.buckets_of(source)
        low, high = self.window(source, np.array(replica))
        some = self.engine_order[int(self.sources.replicas[source])][low:high]
        return first, some, self.replica(some[None, :], np.arange(first, stop)[:, None]) == replica

    def window(self, source: int, replica: Ints) -> tuple[Ints, Ints]:
        """The places on the line (see `replica`) of the engines that replicas of a source serve: from, and to before."""
        replicas, engines = self.sources.replicas[source], self.target.engines
        return replica * engines // replicas, np.minimum((replica + 1) * engines // replicas + 1, engines)

    def replica(self, engine: Ints, bucket: Ints) -> Ints:
        """The replica of a bucket's source that sends it to an engine.

        The source's buckets for all engines, one engine after another, are a line of bytes; each replica has an even part of
        it. So every replica serves as many bytes as any other, whether there are more engines or more replicas.
        """
        replicas = self.sources.replicas[self.bucket_source[bucket]]
        position = engine_position(engine, replicas, self.target.engines) + self._middle[bucket]
        return (position * replicas / self.target.engines).astype(np.int64)

    @cached_property
    def engine_order(self) -> dict[int, Ints]:
        """The engines as they stand on the line, by the number of replicas that a source has."""
        engines = np.arange(self.target.engines)
        return {
            replicas: np.argsort(engine_position(engines, np.array(replicas), self.target.engines))
            for replicas in set(self.sources.replicas.tolist())
        }

    @cached_property
    def _middle(self) -> npt.NDArray[np.float64]:
        """The middle of each bucket in its source's bytes for one engine, from 0 to 1."""
        ends, of_source = np.cumsum(self.bucket_nbytes), np.searchsorted(self.bucket_source, np.arange(len(self.sources) + 1))
        bounds = np.concatenate([[0], ends])[of_source]
        begin, total = bounds[:-1][self.bucket_source], np.diff(bounds)[self.bucket_source]
        return (ends - self.bucket_nbytes / 2 - begin) / total

    # buckets --------------------------------------------------------------------------------------------------------

    def buckets_of(self, source: int) -> tuple[int, int]:
        """The numbers `first, stop` of a source's buckets."""
        first, stop = np.searchsorted(self.bucket_source, [source, source + 1])
        return int(first), int(stop)

    @cached_property
    def bucket_source(self) -> Ints:
        """The source of each bucket, ascending."""
        return self.transfers.source[self.bucket_starts[:-1]]

    @cached_property
    def bucket_engine_rank(self) -> Ints:
        """The rank of an engine that each bucket is for; may be `EVERY_RANK`."""
        return self.transfers.engine_rank[self.bucket_starts[:-1]]

    @cached_property
    def bucket_nbytes(self) -> Ints:
        """The bytes of each bucket."""
        return np.add.reduceat(self.transfers.nbytes, self.bucket_starts[:-1])

    def bucket(self, number: int, rank: int, engines: tuple[int, ...]) -> TransferBucket:
        """Bucket `number` as `rank` sends it to `engines`."""
        columns = (self.bucket_starts, self.bucket_starts[1:], self.bucket_nbytes)
        route = (int(self.bucket_source[number]), rank, engines, int(self.bucket_engine_rank[number]))
        return TransferBucket(number, *route, *(int(column[number]) for column in columns))


def _is_for(ranks: Ints, engine_rank: int) -> npt.NDArray[np.bool_]:
    return (ranks == engine_rank) | (ranks == EVERY_RANK)


def bucket_of_load(load_bytes: int, target: EngineTarget) -> int:
    """`bucket_bytes` of a plan of which loads of `load_bytes` are made."""
    return load_bytes // min(target.ranks, RANKS_PER_LOAD)


def plan_reshard(
    hf_config: HFConfig,
    layout: Layout,
    target: EngineTarget,
    *,
    itemsize: int = 2,
    bucket_bytes: int = BUCKET_BYTES,
    format: WeightFormat | None = None,
    predicts: bool = False,
    lora: AdapterSpec | None = None,
) -> ReshardPlan:
    """Plan the way from training ranks in `layout` to engines; the config is all that is read of the model.

    `itemsize` are the bytes of an element as it is sent (2: bfloat16). With a `format` weights are sent as it stores them.
    `predicts`: the layer for multi-token prediction is sent, too. `lora`: these adapters are sent, and nothing else.

    Raises:
        LayoutError: the training layout or the engines cannot hold the model, or `bucket_bytes` is less than a row of a tensor.
        ModelError: the architecture is unknown, or the config contradicts itself.
        ConfigError: `lora` is for layers that the model does not have.
    """
    architecture = architecture_for(hf_config)
    check_target(hf_config, target)
    vocab = int(architecture.gpt_kwargs(hf_config)["vocab_size"])
    weight_map = architecture.weight_map(hf_config)
    weight_map = weight_map.with_prediction() if predicts else weight_map
    if lora is not None:
        adapted = lora.with_adapters(weight_map, architecture.rows_together(hf_config))
        weight_map = replace(adapted, rules=adapted.rules[len(weight_map.rules) :])
    weight_map = format.quantised_map(weight_map) if format is not None else weight_map
    return plan_of_map(weight_map, layout, target, padded_vocab(vocab, layout.tp), itemsize, bucket_bytes)


def plan_of_map(
    weight_map: WeightMap,
    layout: Layout,
    target: EngineTarget,
    padded_vocab: int,
    itemsize: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> ReshardPlan:
    """Plan, as `plan_reshard`, from the weight map; `padded_vocab` is the vocabulary as the training ranks hold it.

    Raises:
        LayoutError: as there.
    """
    tensors = TensorTable.of(weight_map, itemsize)
    sources = Sources(layout, weight_map.num_layers, weight_map.num_experts)
    transfers = engine_transfers(tensors, sources, target, padded_vocab, bucket_bytes)
    starts = _bucket_starts(transfers, bucket_bytes)
    return ReshardPlan(weight_map, layout, target, padded_vocab, bucket_bytes, tensors, sources, transfers, starts)


def _bucket_starts(transfers: Transfers, bucket_bytes: int) -> Ints:
    """The beginnings of buckets: as many transfers from one source to one rank, in order, as `bucket_bytes` hold."""
    ends = np.cumsum(transfers.nbytes)
    new = (np.diff(transfers.source) != 0) | (np.diff(transfers.engine_rank) != 0)
    bounds = [0, *(np.flatnonzero(new) + 1).tolist(), len(transfers)]
    starts = []
    for at, stop in pairwise(bounds):
        while at < stop:
            starts.append(at)
            before = ends[at - 1] if at else 0
            at = min(stop, int(np.searchsorted(ends, before + bucket_bytes, side="right")))
    return np.array([*starts, len(transfers)], np.int64)
