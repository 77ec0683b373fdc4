"""Trees of prefixes: what responses begin with alike is laid once, planned as such and counted as such."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import prefix_tree as module
from megarl.data.batch import Batch
from megarl.data.media import Media
from megarl.data.micro_batches import plan_micro_batches
from megarl.data.prefix_tree import LEAST_SHARED, common_prefixes, prefix_tree
from megarl.data.sample import Sample
from megarl.data.stream import Response, ScorePosition, Unit, laid_tokens, pack
from megarl.models.flops import FlopsModel
from megarl.models.update_flops import update_flops

FLOPS = FlopsModel(per_token=1000, per_logit_row=0, per_pair=1)


def distinct_prefixes(responses: list[list[int]]) -> int:
    return len({tuple(tokens[:end]) for tokens in responses for end in range(1, len(tokens) + 1)})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=7), min_size=1, max_size=8), st.data())
def test_every_distinct_prefix_is_one_token_of_the_tree(responses: list[list[int]], data: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_SHARED", 1)
        found = common_prefixes([np.array(tokens, np.int32) for tokens in responses])
    nodes, ends = prefix_tree(found, [len(tokens) for tokens in responses])
    for tokens, end in zip(responses, ends, strict=True):
        path: list[int] = []
        while end >= 0:
            node = nodes[end]
            path = responses[node.member][node.start : node.end] + path
            assert node.parent < end
            end = node.parent
        assert path == tokens
    assert sum(node.end - node.start for node in nodes) == distinct_prefixes(responses)
    chosen = data.draw(st.sets(st.sampled_from(range(len(responses)))))
    of_chosen = [responses[number] for number in chosen]
    assert sum(map(len, of_chosen)) - sum(found.repeats(chosen)) == distinct_prefixes(of_chosen)


def test_few_common_tokens_are_computed_by_each_response() -> None:
    alike = np.arange(LEAST_SHARED)
    assert common_prefixes([alike, alike]).common == (LEAST_SHARED,)
    assert common_prefixes([alike[:-1], alike[:-1]]).common == (0,)


def sample(group: int, prompt: list[int], response: list[int], **more: Any) -> Sample:
    return Sample("", f"{group}", "", prompt, response, [1] * len(response), [], [], "stop", **more)


def episodes() -> list[Sample]:
    """Two groups: turns that go on from a common history, which goes on from a shorter one, and answers that share nothing."""
    generator = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return generator.integers(1, 1000, length).tolist()

    found = []
    for group in range(2):
        prompt, first, second = ids(7), ids(20), ids(30)
        ends = [first + ids(4), first + second + ids(5), first + second + ids(9), first + second, ids(12)]
        found += [sample(group, prompt, tokens) for tokens in ends]
    return found


@pytest.mark.parametrize("max_tokens", [90, 130, 10_000])
@pytest.mark.parametrize("position", ScorePosition)
def test_tokens_that_are_planned_counted_and_laid_are_those_of_the_tree(max_tokens: int, position: ScorePosition) -> None:
    batch = Batch(episodes())
    units = batch.unit_rows(range(len(batch)), share_prefix=True)
    plan = plan_micro_batches(units.sizes, ranks=1, max_tokens=max_tokens, flops=FLOPS)
    shares = batch.shares(units, plan, [])
    laid = [pack(micro_batch, position=position) for share in shares for micro_batch in share]
    assert all(len(stream.token_ids) <= max_tokens for stream in laid)
    padded = {"segment_multiple": 4, "pad_to_multiple": 8, "position": position}
    for micro_batch in (micro_batch for share in shares for micro_batch in share):
        assert laid_tokens(micro_batch, **padded) == len(pack(micro_batch, **padded).token_ids)
    counted = update_flops(FLOPS, shares, shared_prompts=True, position=position, logits=False)
    assert counted.tokens == sum(len(stream.token_ids) for stream in laid)
    pairs = sum(s.length * s.before + s.length * (s.length + 1) // 2 for stream in laid for s in stream.segments)
    assert counted.decoder == 3 * (1000 * counted.tokens + pairs)
    last = position is ScorePosition.NEXT
    assert counted.apart == sum(len(one.prompt_ids) + len(one.response_ids) - last for one in batch.samples)
    if max_tokens == 10_000:  # a group's prompt, both histories once, and what each response has alone
        alone = 3 + 4 + 8 + 11 if last else 4 + 5 + 9 + 12 + 1  # the last token of the fourth response is its own
        assert counted.tokens == 2 * (7 + 20 + 30 + alone)


def test_a_response_shares_nothing_from_its_first_picture_on_nor_where_it_has_token_columns() -> None:
    tokens = list(range(1, 60))
    picture = Media("image", ("red",), (1, 2, 2), 7 + 30, 1)
    batch = Batch([sample(0, [5] * 7, tokens, media=[picture]) for _ in range(2)])
    assert batch.unit_rows([0, 1], share_prefix=True).sizes[0].common.common == (30,)
    batch = Batch([sample(0, [5] * 7, tokens) for _ in range(2)])
    assert batch.unit_rows([0, 1], share_prefix=True).sizes[0].common.common == (58,)
    units = batch.unit_rows([0, 1], share_prefix=True, share_turns=False)
    assert units.sizes[0].common.common == ()
    [[plain]] = batch.shares(units, [[[(0, (0, 1))]]], [])[0]
    column = {"column": torch.zeros(len(tokens), 2, 1, dtype=torch.uint8)}
    unit = replace(plain, responses=[replace(one, extra=column) for one in plain.responses])
    stream = pack([unit])
    assert len(stream.token_ids) == 7 + 2 * 58
    assert stream.extra["column"].shape == (len(stream.token_ids), 2, 1)
    assert len(pack([plain]).token_ids) == 7 + 58
    assert len(pack([plain], share_turns=False).token_ids) == laid_tokens([plain], share_turns=False) == 7 + 2 * 58


def test_tokens_at_other_positions_are_not_shared() -> None:
    ids, mask = torch.arange(40), torch.ones(40, dtype=torch.bool)
    follows = (3 + torch.arange(40)).expand(3, -1).clone()
    moved = follows.clone()
    moved[1, 25:] += 1
    unit = Unit(torch.arange(3), [Response(n, ids, mask, positions=p) for n, p in enumerate((follows, moved))])
    assert len(pack([unit]).token_ids) == 3 + 25 + 2 * 14
