"""The stream of a layer for multi-token prediction, taken apart again: every token beside the one before it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megarl.data.stream import Response, Unit, pack, split_shared_prompts
from megarl.options.prediction.stream import shifted


def units() -> list[Unit]:
    """Every token has a number of its own; prompts of one and more tokens, responses of one and more, masks with holes."""
    generator = torch.Generator().manual_seed(1)
    found, index, token = [], 0, 100
    for prompt, lengths in ((4, (3, 5)), (1, (1, 4)), (2, (1,)), (1, (6,)), (5, (2, 2, 7))):
        ids, token = torch.arange(token, token + prompt), token + prompt
        responses = []
        for length in lengths:
            mask = torch.rand(length, generator=generator) < 0.7
            responses.append(Response(index, torch.arange(token, token + length), mask))
            index, token = index + 1, token + length
        found.append(Unit(ids, responses))
    return found


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_every_row_predicts_a_sampled_token_from_the_two_before_it(shared: bool, multiple: int) -> None:
    given = units() if shared else split_shared_prompts(units())
    stream = pack(given, pad_to_multiple=multiple, segment_multiple=multiple)
    found = shifted(given, stream, pad_to_multiple=multiple, segment_multiple=multiple)
    sequences = [torch.cat([unit.prompt_ids, one.token_ids]).tolist() for unit in given for one in unit.responses]
    neighbours = {pair for ids in sequences for pair in pairwise(ids)}
    laid = found.stream
    real = [place for segment in laid.segments for place in range(segment.start, segment.start + segment.length)]
    tokens, before = laid.token_ids.tolist(), stream.token_ids[found.before].tolist()
    assert {(before[place], tokens[place]) for place in real} <= neighbours
    predicted = {}
    for row, policy_row, target in zip(laid.rows.tolist(), found.policy_rows.tolist(), laid.targets.tolist(), strict=True):
        predicted[target] = (before[row], tokens[row])
        assert stream.token_ids[policy_row] == tokens[row]  # the policy predicts the same token, from the one before it
    sampled = {}
    for unit, ids in zip((u for u in given for _ in u.responses), sequences, strict=True):
        own = next(one for one in unit.responses if one.token_ids[-1] == ids[-1])
        for place in (len(unit.prompt_ids) + own.mask.nonzero().flatten()).tolist():
            if place >= 2:
                sampled[ids[place]] = (ids[place - 2], ids[place - 1])
    assert predicted == sampled
    assert len(laid.token_ids) % multiple == 0


def test_a_token_sees_its_own_sequence_from_the_second_token_on() -> None:
    given = units()
    laid = shifted(given, pack(given)).stream
    sequences = [torch.cat([unit.prompt_ids, one.token_ids]).tolist() for unit in given for one in unit.responses]
    wanted = {tuple(ids[1:-1]) for ids in sequences if len(ids) > 2}
    seen = set()
    for parts in laid.parts:
        ids = [i for part in parts for i in laid.token_ids[laid.segments[part].start :][: laid.segments[part].length].tolist()]
        seen.add(tuple(ids))
        places = [
            p
            for part in parts
            for p in range(laid.segments[part].start, laid.segments[part].start + laid.segments[part].length)
        ]
        assert laid.position_ids[places].tolist() == list(range(len(places)))
    assert wanted <= seen


def test_there_is_a_token_even_if_nothing_is_predicted() -> None:
    lonely = [Unit(torch.tensor([5]), [Response(0, torch.tensor([6]), torch.tensor([True]))])]
    found = shifted(lonely, pack(lonely), pad_to_multiple=2)
    assert len(found.stream.token_ids) == 2
    assert len(found.stream.rows) == len(found.policy_rows) == 0
