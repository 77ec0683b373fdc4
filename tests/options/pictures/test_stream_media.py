"""Pictures in streams: whose features go where, each picture once, and positions on three axes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megarl.data.media import Media
from megarl.data.stream import Response, Unit, context_parallel_shard, pack, split_shared_prompts

TALL = Media("image", ("tall",), (1, 4, 2), 1, 2)
WIDE = Media("image", ("wide",), (1, 2, 6), 4, 3)


def unit(index: int, length: int, *media: Media, positions: bool = True) -> Unit:
    """Token `100 * index + n` is the prompt's n-th; two responses of three tokens each."""
    responses = [Response(2 * index + n, torch.arange(3), torch.ones(3, dtype=torch.bool)) for n in range(2)]
    of_axes = torch.stack([torch.arange(length) * factor for factor in (1, 2, 3)]) if positions else None
    return Unit(100 * index + torch.arange(length), responses, media, of_axes)


UNITS = [unit(1, 8, TALL, WIDE), unit(2, 4, positions=False), unit(3, 7, WIDE)]


@pytest.mark.parametrize("shared", [True, False])
def test_every_placeholder_gets_its_own_feature_and_each_picture_is_there_once(shared: bool) -> None:
    stream = pack(UNITS if shared else split_shared_prompts(UNITS), pad_to_multiple=16, segment_multiple=4)
    assert stream.media is not None
    assert [picture.digests for picture in stream.media.pictures] == [("tall",), ("wide",)]
    found = dict(zip(stream.media.places.tolist(), stream.media.rows.tolist(), strict=True))
    wanted = {101: 0, 102: 1, 104: 2, 105: 3, 106: 4, 304: 2, 305: 3, 306: 4}  # features by token
    for place, token in enumerate(stream.token_ids.tolist()):
        assert found.get(place) == wanted.get(token), place
    assert len(found) == len(wanted) * (1 if shared else 2)


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_share_the_features_out(cp: int) -> None:
    stream = pack(UNITS, segment_multiple=2 * cp, pad_to_multiple=2 * cp)
    assert stream.media is not None
    all_rows = dict(zip(stream.media.places.tolist(), stream.media.rows.tolist(), strict=True))
    names = [(picture.digests[0], number) for picture in stream.media.pictures for number in range(picture.tokens)]
    found = {}
    for rank in range(cp):
        share = context_parallel_shard(stream, cp, rank)
        own = stream.media.of_tokens(share.positions, len(stream.token_ids))
        if own is None:
            continue
        mine = [(picture.digests[0], number) for picture in own.pictures for number in range(picture.tokens)]
        assert {mine[row][0] for row in own.rows.tolist()} == {picture.digests[0] for picture in own.pictures}
        found |= {int(share.positions[p]): mine[row] for p, row in zip(own.places.tolist(), own.rows.tolist(), strict=True)}
    assert found == {place: names[row] for place, row in all_rows.items()}


def test_a_rank_whose_tokens_show_nothing_has_no_pictures() -> None:
    stream = pack(UNITS)
    assert stream.media is not None
    assert stream.media.of_tokens(torch.tensor([0, 3]), len(stream.token_ids)) is None
    [only] = stream.media.of_tokens(torch.tensor([3, 4]), len(stream.token_ids)).pictures  # type: ignore[union-attr]
    assert only is WIDE


@pytest.mark.parametrize("shared", [True, False])
def test_responses_follow_the_largest_position_on_all_axes(shared: bool) -> None:
    stream = pack(UNITS if shared else split_shared_prompts(UNITS))
    assert stream.position_ids.shape == (3, len(stream.token_ids))
    largest = [3 * 7, 3, 3 * 6]
    for number, (segment, end) in enumerate(zip(stream.segments, pairwise(stream.boundaries), strict=True)):
        of_unit = number // 3 if shared else number // 2
        length = len(UNITS[of_unit].prompt_ids)
        positions = stream.position_ids[:, slice(*end)]
        if segment.path or not shared:
            behind = positions if shared else positions[:, length:]
            assert behind.tolist() == [[largest[of_unit] + 1, largest[of_unit] + 2]] * 3
        if not segment.path:
            factors = (1, 1, 1) if of_unit == 1 else (1, 2, 3)
            assert positions[:, :length].tolist() == [[n * factor for n in range(length)] for factor in factors]


def test_prompts_without_pictures_have_one_position_a_token_and_nothing_more() -> None:
    stream = pack(UNITS[1:2])
    assert stream.media is None
    assert stream.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 4, 5]


def test_positions_of_another_length_are_refused() -> None:
    broken = Unit(torch.arange(3), UNITS[0].responses, (), torch.zeros(3, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"a prompt of 3 tokens has positions \[3, 4\]; they must be \[3, 3\]"):
        pack([broken])


def told(index: int, length: int, *media: Media) -> Response:
    """Token `1000 + 100 * index + n` is the response's n-th; its positions are 50 more than those on one axis."""
    mask = torch.ones(length, dtype=torch.bool)
    for shown in media:
        mask[shown.place : shown.place + shown.tokens] = False
    positions = torch.stack([50 + torch.arange(length) * factor for factor in (1, 2, 3)]) if media else None
    return Response(index, 1000 + 100 * index + torch.arange(length), mask, {}, media, positions)


IN_TURNS = [
    Unit(torch.arange(100, 108), [told(0, 6, TALL), told(1, 9, TALL, WIDE), told(2, 3)], (WIDE,), torch.arange(24).view(3, 8)),
    Unit(torch.arange(200, 205), [told(3, 8, WIDE)]),
]


@pytest.mark.parametrize("shared", [True, False])
def test_pictures_between_turns_stand_in_their_response(shared: bool) -> None:
    stream = pack(IN_TURNS if shared else split_shared_prompts(IN_TURNS), pad_to_multiple=16, segment_multiple=4)
    assert stream.media is not None
    assert [picture.digests for picture in stream.media.pictures] == [("wide",), ("tall",)]
    found: dict[int, set[int]] = {}
    for place, row in zip(stream.media.places.tolist(), stream.media.rows.tolist(), strict=True):
        found.setdefault(int(stream.token_ids[place]), set()).add(row)
    wide, tall = {4: 0, 5: 1, 6: 2}, {1: 3, 2: 4}
    wanted = {100 + at: row for at, row in wide.items()} | {1000 + at: row for at, row in tall.items()}
    wanted |= {1100 + at: row for at, row in (tall | wide).items()} | {1300 + at: row for at, row in wide.items()}
    assert found == {token: {row} for token, row in wanted.items()}
    assert len(stream.media.places) == len(wanted) + (0 if shared else 2 * 3)  # the first prompt's, once for each copy
    # a response has its own positions, or follows the prompt's largest, or the number of its tokens
    of_token = dict(zip(stream.token_ids.tolist(), stream.position_ids.T.tolist(), strict=True))
    assert [of_token[1100 + at] for at in range(8)] == [[50 + at, 50 + 2 * at, 50 + 3 * at] for at in range(8)]
    assert [of_token[1200 + at] for at in range(2)] == [[24 + at] * 3 for at in range(2)]
    assert [of_token[200 + at] for at in range(5)] == [[at] * 3 for at in range(5)]


def test_pictures_without_positions_are_a_mistake() -> None:
    unplaced = Response(0, torch.arange(6), torch.ones(6, dtype=torch.bool), {}, (TALL,))
    with pytest.raises(ValueError, match="response 0 shows pictures, but has no positions"):
        pack([Unit(torch.arange(3), [unplaced])])
    last = told(0, 7, WIDE)
    with pytest.raises(ValueError, match="response 0 ends with a picture; its last token must be one that was sampled"):
        pack([Unit(torch.arange(3), [last])])
    short = Response(0, torch.arange(6), torch.ones(6, dtype=torch.bool), {}, (TALL,), torch.zeros(3, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"a response of 6 tokens has positions \[3, 5\]; they must be \[3, 6\] or \[6\]"):
        pack([Unit(torch.arange(3), [short])])
