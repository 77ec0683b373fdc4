"""A head is asked once about what sequences that begin alike predict, and every token gets its own answer."""

from __future__ import annotations

import pytest
import torch

from megarl.data.stream import SCORED_IDS, PackedStream, Response, Unit, context_parallel_shard, pack
from megarl.megatron.asked_rows import AskedRows


def stream_of(shared: int, rest: int, wide: int, segment_multiple: int = 1) -> PackedStream:
    """Four sequences with the first `shared` tokens in common, each position scored, with `wide` further targets."""
    draw = torch.Generator().manual_seed(shared)
    head = torch.randint(0, 50, (shared,), generator=draw)
    further = torch.randint(0, 50, (shared, wide), generator=draw).float()
    responses = []
    for index in range(4):
        own, targets = torch.randint(0, 50, (rest,), generator=draw), torch.randint(0, 50, (rest, wide), generator=draw).float()
        columns = {SCORED_IDS: torch.cat([further, targets])} if wide else {}
        responses.append(Response(index, torch.cat([head, own]), torch.ones(shared + rest, dtype=torch.bool), columns))
    units = [Unit(torch.tensor([7]), responses)]
    return pack(units, segment_multiple=segment_multiple, pad_to_multiple=segment_multiple)


@pytest.mark.parametrize("wide", [0, 2])
@pytest.mark.parametrize("cp", [1, 2])
def test_every_scored_token_is_answered_about_its_own_row_and_targets(wide: int, cp: int) -> None:
    stream = stream_of(40, 10, wide, 2 * cp if cp > 1 else 1)
    seen = 0
    for rank in range(cp):
        share = context_parallel_shard(stream, cp, rank)
        asked = AskedRows.of(stream, share)
        expected = stream.targets[share.scored][:, None].double()
        if wide:
            expected = torch.cat([expected, stream.columns[SCORED_IDS][share.scored].double()], dim=1)
        own = torch.cat([share.rows[:, None].double(), expected], dim=1)
        of_rows = torch.cat([asked.rows[:, None].double(), asked.targets.view(len(asked.rows), -1).double()], dim=1)
        assert torch.equal(asked.of_tokens(of_rows), own)
        seen += len(asked.rows)
    assert seen == 40 + 4 * 10


def test_gradients_of_what_is_asked_once_are_summed() -> None:
    stream = stream_of(40, 10, 0)
    asked = AskedRows.of(stream, context_parallel_shard(stream, 1, 0))
    assert asked.places is not None
    answered = torch.randn(len(asked.rows), 2, dtype=torch.float64).requires_grad_()
    weights = torch.randn(len(stream.rows), 2, dtype=torch.float64)
    (asked.of_tokens(answered) * weights).sum().backward()
    expected = torch.zeros_like(weights[: len(asked.rows)]).index_add(0, asked.places, weights)
    assert torch.allclose(answered.grad, expected)  # type: ignore[arg-type]


def test_streams_with_little_in_common_are_asked_about_as_they_are() -> None:
    stream = stream_of(2, 60, 0)
    share = context_parallel_shard(stream, 1, 0)
    asked = AskedRows.of(stream, share)
    assert asked.places is None
    assert asked.rows is share.rows
