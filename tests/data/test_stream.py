"""Streams under context parallelism: what each rank holds, and that padding segments changes nothing that is scored."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megarl.data.stream import PackedStream, Response, ScorePosition, Unit, context_parallel_shard, pack, zigzag


def some_units(lengths: list[tuple[int, tuple[int, ...]]]) -> list[Unit]:
    """Units of (prompt length, response lengths) with distinct tokens; about two in three response tokens are scored."""
    generator = torch.Generator().manual_seed(0)
    tokens = iter(range(1, 10**6))
    units, index = [], 0
    for prompt_length, response_lengths in lengths:
        responses = []
        for length in response_lengths:
            mask = torch.rand(length, generator=generator) < 0.7
            responses.append(Response(index, torch.tensor([next(tokens) for _ in range(length)]), mask, {"own": mask * 1.5}))
            index += 1
        units.append(Unit(torch.tensor([next(tokens) for _ in range(prompt_length)]), responses))
    return units


ODD = [(5, (3, 7, 1)), (2, (4,)), (1, (1,)), (9, (1, 2)), (30, (41,)), (1, (1, 1))]


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_each_sequence_is_cut_as_transformer_engine_cuts_packed_sequences(cp: int) -> None:
    """Its documented convention: 2·cp chunks per sequence; rank r has the r-th from the start and the r-th from the end."""
    boundaries = [0, 2 * cp, 8 * cp, 12 * cp]
    found = zigzag(boundaries, cp)
    for rank in range(cp):
        expected: list[int] = []
        for start, end in pairwise(boundaries):
            sequence = list(range(start, end))
            size = len(sequence) // (2 * cp)
            expected += sequence[rank * size : (rank + 1) * size]
            expected += sequence[len(sequence) - (rank + 1) * size : len(sequence) - rank * size]
        assert found[rank].tolist() == expected


@pytest.mark.parametrize("position", ScorePosition)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_every_token_and_every_score_belongs_to_exactly_one_rank(cp: int, position: ScorePosition) -> None:
    stream = pack(some_units(ODD), pad_to_multiple=24 * cp, segment_multiple=2 * cp, position=position)
    assert len(stream.token_ids) % (24 * cp) == 0
    shares = [context_parallel_shard(stream, cp, rank) for rank in range(cp)]
    assert torch.cat([share.positions for share in shares]).sort()[0].tolist() == list(range(len(stream.token_ids)))
    assert torch.cat([share.scored for share in shares]).sort()[0].tolist() == list(range(len(stream.rows)))
    for share in shares:
        assert len(share.positions) == len(stream.token_ids) // cp
        assert torch.equal(share.positions[share.rows], stream.rows[share.scored])


def scored(stream: PackedStream) -> list[tuple[Tensor, ...]]:
    return [
        (stream.token_ids[row], stream.position_ids[row], target, own)
        for row, target, own in zip(stream.rows, stream.targets, stream.columns["own"], strict=True)
    ]


@pytest.mark.parametrize("position", ScorePosition)
def test_padding_segments_changes_no_score_and_no_position(position: ScorePosition) -> None:
    plain = pack(some_units(ODD), position=position)
    padded = pack(some_units(ODD), pad_to_multiple=48, segment_multiple=8, position=position)
    assert scored(padded) == scored(plain)
    assert padded.owners[3][0] == plain.owners[3][0]
    assert len(plain.token_ids) == sum(segment.length for segment in plain.segments) == plain.boundaries[-1]
    for one, other in zip(padded.segments, plain.segments, strict=True):
        assert one.start % 8 == 0
        assert (one.length, one.path, one.before) == (other.length, other.path, other.before)
        for field in ("token_ids", "position_ids"):
            ours, theirs = getattr(padded, field), getattr(plain, field)
            assert torch.equal(ours[one.start : one.start + one.length], theirs[other.start : other.start + one.length])
            before = padded.tokens_before(one, one.before), plain.tokens_before(other, one.before)
            assert torch.equal(ours[before[0]], theirs[before[1]])
    assert all((end - start) % 8 == 0 for start, end in pairwise(padded.boundaries))


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_split_gives_no_rank_more_attention_work_than_the_others(cp: int) -> None:
    """Pairs of a token and one that it attends to, for long segments of odd lengths and shared prompts."""
    units = some_units([(701, (1203,)), (330, (507, 611, 402)), (12, (2001,))])
    stream = pack(units, pad_to_multiple=2 * cp, segment_multiple=2 * cp)
    pairs = torch.zeros(len(stream.token_ids))
    for segment in stream.segments:
        pairs[segment.start : segment.start + segment.length] = torch.arange(segment.length) + 1.0 + segment.before
    of_rank = pairs[zigzag(stream.boundaries, cp)].sum(1)
    assert float(of_rank.max() / of_rank.mean()) < 1.03
    runs = [pairs[start:end].view(cp, -1).sum(1) for start, end in pairwise(stream.boundaries)]
    in_order = torch.stack(runs).sum(0)
    assert float(in_order.max() / in_order.mean()) > 1.2, "this case would be balanced without a zig-zag"


@pytest.mark.parametrize("values", [torch.tensor([3, 4, 5], dtype=torch.int16), torch.tensor([0.5, 1.5, 2.5])])
def test_a_token_column_has_what_was_laid_and_is_unknown_elsewhere(values: Tensor) -> None:
    response = Response(0, torch.tensor([3, 4]), torch.tensor([True, True]), extra={"mine": values[2:]})
    laid = pack([Unit(torch.tensor([1, 2]), [response], extra={"mine": values[:2]})], pad_to_multiple=8).extra["mine"]
    assert laid.dtype == values.dtype
    assert laid[:3].tolist() == values.tolist()
    unknown = laid[3:].isnan() if laid.is_floating_point() else laid[3:] == torch.iinfo(laid.dtype).max
    assert unknown.all()
    assert len(unknown) == 5
