"""The proof of a plan, before its first use: every byte that an engine takes is sent exactly once, by a rank that has it.

It believes nothing that the plan's makers computed: the boxes are compared with what the engine's ranks hold (`slices.py`),
with what the packings say of each shard, and with the layout's own coordinates of every training rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megarl.config.layout import Layout
from megarl.errors import LayoutError, counted
from megarl.weights.plan import ReshardPlan
from megarl.weights.sglang_targets import EVERY_RANK
from megarl.weights.sources import shard_runs
from megarl.weights.tensors import Ints


@dataclass(frozen=True)
class Proof:
    """The extent of a check: transfers and slices of one engine, all bytes sent to all engines, and buckets sent to engines."""

    transfers: int
    slices: int
    nbytes: int
    bucket_sends: int


def verify(plan: ReshardPlan) -> Proof:
    """Check a plan.

    Raises:
        LayoutError: a byte is missing, sent twice, or sent by a rank that does not have it; names tensor, ranks and layouts.
    """
    at = _slice_of_transfers(plan)
    _check_coverage(plan, at)
    _check_owners(plan)
    _check_buckets(plan)
    sends = _check_assignment(plan)
    return Proof(len(plan.transfers), len(plan.all_slices), int(plan.received_bytes.sum()) * plan.target.engines, sends)


def _slice_of_transfers(plan: ReshardPlan) -> Ints:
    """For each transfer the slice that it fills, once it is sure that it lies in it, where the transfer says."""
    t, slices, ranks = plan.transfers, plan.all_slices, plan.target.ranks
    keys = slices.tensor * (ranks + 1) + slices.engine_rank - EVERY_RANK
    transfer_keys = t.tensor * (ranks + 1) + t.engine_rank - EVERY_RANK
    at = np.minimum(np.searchsorted(keys, transfer_keys), len(keys) - 1)
    _none(plan, keys[at] != transfer_keys, "is sent to a rank that holds nothing of it")
    inside = (
        (t.row >= slices.row[at])
        & (t.row + t.rows <= slices.row[at] + slices.rows[at])
        & (t.col >= slices.col[at])
        & (t.col + t.cols <= slices.col[at] + slices.cols[at])
        & (t.target_row == t.row - slices.row[at])
        & (t.target_col == t.col - slices.col[at])
    )
    _none(plan, ~inside, "is sent to a place where the rank does not hold it")
    _none(plan, t.nbytes != t.rows * t.cols * plan.tensors.itemsize[t.tensor], "has another size than is planned")
    return at


def _check_coverage(plan: ReshardPlan, at: Ints) -> None:
    """Every slice is full, and no two transfers of it overlap."""
    t, slices = plan.transfers, plan.all_slices
    order = np.argsort(at, kind="stable")
    of = at[order]
    row, col = t.row[order], t.col[order]
    row_end, col_end = row + t.rows[order], col + t.cols[order]
    for lag in range(1, int(np.bincount(at).max(initial=1))):
        first = np.flatnonzero(of[:-lag] == of[lag:])
        other = first + lag
        overlap = (
            (row[first] < row_end[other])
            & (row[other] < row_end[first])
            & (col[first] < col_end[other])
            & (col[other] < col_end[first])
        )
        if overlap.any():
            at_fault = np.argmax(overlap)
            pair = sorted((int(order[first[at_fault]]), int(order[other[at_fault]])))
            _fail(plan, pair[0], f"is sent twice, the second time by rank {_rank(plan, pair[1])}")
    sent = np.bincount(at, weights=t.rows * t.cols, minlength=len(slices)).astype(np.int64)
    short = np.flatnonzero(sent != slices.rows * slices.cols)
    if len(short):
        number = int(short[0])
        name, to = plan.tensors.names[slices.tensor[number]], _to(int(slices.engine_rank[number]))
        raise LayoutError(
            f"the reshard plan leaves a part of tensor '{name}' for {to} unsent: {sent[number]} of "
            f"{slices.rows[number] * slices.cols[number]} elements come ({layouts(plan)})"
        )


def _check_owners(plan: ReshardPlan) -> None:
    """The sending rank, and all its replicas, hold the box at the place of their shard that the transfer names."""
    t, tensors, layout = plan.transfers, plan.tensors, plan.layout
    places = _places(plan)
    of_expert = tensors.expert[t.tensor] >= 0
    stages = layout.stage_layers(plan.weight_map.num_layers)
    stage_of = np.empty(plan.weight_map.num_layers + 1, np.int64)  # the last for tensors outside the layers
    for number, chunks in enumerate(stages):
        stage_of[[layer for chunk in chunks for layer in chunk]] = number
    first, layer = np.array([rule.stage == "first" for rule in tensors.rules]), tensors.layer[t.tensor]
    stage = np.where(layer >= 0, stage_of[layer], np.where(first[tensors.rule[t.tensor]], 0, layout.pp - 1))
    pp, slot, group = places[:, t.source]
    held_by = np.where(of_expert, tensors.expert[t.tensor] // max(1, plan.weight_map.num_experts // layout.ep), -1)
    _none(plan, (pp != stage) | (group != held_by), "is sent by a rank that does not have its layer or expert")
    for number, rule in enumerate(tensors.rules):
        of_rule = np.flatnonzero(tensors.rule[t.tensor] == number)
        runs = np.array(shard_runs(rule, layout, plan.padded_vocab), np.int64)
        rows = _Along(plan, of_rule, 1 if rule.packing.tp_axis == 1 else 0)
        owned = np.zeros(len(of_rule), np.bool_)
        for shard, part, start, stop, offset in runs.tolist():
            owned |= (
                (slot[of_rule] == shard)
                & (tensors.part[t.tensor[of_rule]] == part)
                & (rows.start >= start)
                & (rows.stop <= stop)
                & (rows.source - offset == rows.start - start)
                & (rows.other_source == rows.other_start)
            )
        if not owned.all():
            _fail(plan, int(of_rule[np.argmin(owned)]), "is sent by a rank that does not have it, or not there")


class _Along:
    """The extent of transfers along the axis that is split, and along the other."""

    def __init__(self, plan: ReshardPlan, index: Ints, axis: int) -> None:
        t = plan.transfers
        rows = (t.row[index], t.rows[index], t.source_row[index])
        cols = (t.col[index], t.cols[index], t.source_col[index])
        (self.start, length, self.source), (self.other_start, _, self.other_source) = (cols, rows) if axis else (rows, cols)
        self.stop = self.start + length


def _places(plan: ReshardPlan) -> Ints:
    """`[3, sources]`: stage, shard and expert group (-1: dense) of each source, by the coordinates of all its ranks."""
    coordinates = np.full((3, len(plan.sources)), -2, np.int64)
    for rank in range(plan.layout.world_size):
        rank_coords = plan.layout.coords(rank)
        for source, replica in plan.sources.of_rank(rank):
            dense = source < plan.sources.num_dense
            source_coords = (rank_coords.pp, rank_coords.tp, -1) if dense else (rank_coords.pp, rank_coords.etp, rank_coords.ep)
            if plan.sources.rank(np.array(source), np.array(replica)) != rank or (
                coordinates[0, source] >= 0 and tuple(coordinates[:, source]) != source_coords
            ):
                raise LayoutError(f"rank {rank} is counted as a replica of source {source}, which it is not ({layouts(plan)})")
            coordinates[:, source] = source_coords
    return coordinates


def _check_buckets(plan: ReshardPlan) -> None:
    """Buckets are runs of transfers from one source to one rank, at most `bucket_bytes` each, with none left out."""
    starts, t = plan.bucket_starts, plan.transfers
    bucket_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    one_link = np.array_equal(plan.bucket_source[bucket_of], t.source) and np.array_equal(
        plan.bucket_engine_rank[bucket_of], t.engine_rank
    )
    if starts[0] != 0 or starts[-1] != len(t) or (np.diff(starts) < 1).any() or not one_link:
        raise LayoutError(f"the buckets of the reshard plan are not its transfers, each once ({layouts(plan)})")
    if plan.bucket_nbytes.max() > plan.bucket_bytes:
        _fail(plan, int(starts[np.argmax(plan.bucket_nbytes)]), f"is in a bucket of more than {plan.bucket_bytes} bytes")


def _check_assignment(plan: ReshardPlan) -> int:
    """Every bucket reaches every engine from exactly one replica, which looks for it there; how many sends there are."""
    total = 0
    for source in np.unique(plan.bucket_source).tolist():
        first, stop = plan.buckets_of(source)
        replicas = int(plan.sources.replicas[source])
        order = plan.engine_order[replicas]
        if not np.array_equal(np.sort(order), np.arange(plan.target.engines)):
            _fail(plan, int(plan.bucket_starts[first]), "does not reach every engine once")
        replica = plan.replica(order[None, :], np.arange(first, stop)[:, None])
        low, high = plan.window(source, replica)
        position = np.arange(len(order))
        missed = (replica < 0) | (replica >= replicas) | (position < low) | (position >= high)
        if missed.any():
            bucket, at = np.argwhere(missed)[0]
            _fail(plan, int(plan.bucket_starts[first + bucket]), f"is sent to engine {order[at]} by no replica")
        total += replica.size
    return total


def layouts(plan: ReshardPlan) -> str:
    """Both layouts of a plan in words."""
    return f"training layout {stated(plan.layout)}, {counted(plan.target.engines, 'engine')} of {stated(plan.target)}"


def stated(layout: Layout | object) -> str:
    """`tp=8,pp=2`: what differs from one rank."""
    defaults = type(layout)()
    names = [field.name for field in fields(layout) if field.name not in ("engines", "whole", "sequence_parallel")]  # type: ignore[arg-type]
    settings = [f"{name}={getattr(layout, name)}" for name in names if getattr(layout, name) != getattr(defaults, name)]
    return ",".join(settings) or "one rank"


def _none(plan: ReshardPlan, wrong: npt.NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        _fail(plan, int(np.argmax(wrong)), what)


def _fail(plan: ReshardPlan, row: int, what: str) -> NoReturn:
    transfer = plan.transfer(row)
    raise LayoutError(
        f"the reshard plan is wrong: tensor '{transfer.tensor}', rows {transfer.row} to {transfer.row + transfer.rows}, from "
        f"rank {_rank(plan, row)} to {_to(transfer.engine_rank)}, {what} ({layouts(plan)})"
    )


def _to(engine_rank: int) -> str:
    return "every rank of every engine" if engine_rank == EVERY_RANK else f"rank {engine_rank} of every engine"


def _rank(plan: ReshardPlan, row: int) -> int:
    """The first of the ranks that may send a transfer."""
    return int(plan.sources.rank(plan.transfers.source[row], np.array(0)))
