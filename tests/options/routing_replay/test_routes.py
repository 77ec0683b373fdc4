"""Routes: what is kept, what is unknown, and which tokens they are of, wherever they travel."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.batch import Batch
from megarl.data.columns import padded, unknown
from megarl.data.sample import Sample, read_record
from megarl.data.stream import pack, split_shared_prompts
from megarl.options.routing_replay.column import (
    RecordedRoutes,
    agreed,
    compact,
    from_json,
    joined,
    known,
    missing,
    of_one_version,
    to_json,
)
from megarl.rollout.engines.protocol import Generation, behind
from megarl.rollout.scheduling.partial_groups import PartialGroup

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def test_one_byte_is_enough_for_255_experts_and_more_take_two() -> None:
    assert compact(np.array([[0, 254]]), 255).dtype == np.uint8
    assert compact(np.array([[0, 255]]), 256).tolist() == [[0, 255]]
    assert compact(np.array([[0, 255]]), 256).dtype == np.int16


@pytest.mark.parametrize("row", [[3, 3], [-1, 2], [2, 8], [-1, -1]])
def test_a_choice_that_no_router_makes_is_not_known(row: list[int]) -> None:
    routes = compact(np.array([[row, [7, 0]]]), EXPERTS)
    assert routes.tolist() == [[[255, 255], [7, 0]]]
    assert known(routes).tolist() == [[False, True]]


def test_responses_share_what_they_agree_on_in_whatever_order() -> None:
    first, second = np.array([[[1, 2]], [[3, 4]]], np.uint8), np.array([[[2, 1]], [[3, 5]]], np.uint8)
    assert agreed([first, second]).tolist() == [[[1, 2]], [[255, 255]]]
    assert agreed([first]).tolist() == first.tolist()


def test_tokens_that_older_weights_sampled_have_no_known_choice() -> None:
    """Prompt of two tokens; the choice that led to response token t stands at the token before it."""
    routes = compact(np.arange(7)[:, None, None] + np.array([0, 1]), EXPERTS)
    mask, versions = [1, 1, 0, 1, 1], [4, 4, 4, 5, 5]
    left = of_one_version(routes, 2, mask, versions)
    assert known(left)[:, 0].tolist() == [True, False, False, True, True, True, True]
    assert left[known(left)].tolist() == routes[known(left)].tolist()
    assert of_one_version(routes, 2, mask, [5] * 5).tolist() == routes.tolist()


def test_stages_of_a_pipeline_give_the_layers_that_they_have() -> None:
    first = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[1, 3], [2, 4]]], np.uint8)
    second = np.array([[[0, 1]], [[2, 3]], [[4, 5]]], np.uint8)
    rows, lengths = np.array([9, 4]), np.array([2, 1])
    whole = joined([RecordedRoutes(rows, lengths, (0, 2), first), RecordedRoutes(rows, lengths, (1,), second)])
    assert {row: routes.tolist() for row, routes in whole.items()} == {
        9: [[[1, 2], [0, 1], [3, 4]], [[5, 6], [2, 3], [7, 0]]],
        4: [[[1, 3], [4, 5], [2, 4]]],
    }


@st.composite
def samples(draw: Any) -> list[Sample]:
    """Groups that share a prompt and its routes; each (token, layer) has a choice of its own, or none is known."""
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))

    def routes(tokens: int) -> Any:
        chosen = generator.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        chosen[generator.random((tokens, LAYERS)) < 0.2] = -1
        return compact(chosen, EXPERTS)

    found: list[Sample] = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
        of_prompt = routes(len(prompt))
        for _ in range(draw(st.integers(1, 3))):
            ids = draw(st.lists(st.integers(0, 9), max_size=7))
            own = np.concatenate([of_prompt, routes(len(ids))])
            own[-1] = unknown(own.dtype)
            names, n = (f"{len(found)}", f"g{group}", "row"), len(ids)
            found.append(Sample(*names, prompt, ids, [1] * n, [-1.0] * n, [0] * n, "stop", extra={"routes": own}))
    return found


@settings(max_examples=40, deadline=None)
@given(samples(), st.booleans(), st.sampled_from([1, 4]))
def test_every_token_of_a_stream_has_the_routes_that_its_sample_has(
    given_samples: list[Sample], share_prefix: bool, multiple: int
) -> None:
    batch = Batch(given_samples)
    units = batch.unit_rows(range(len(batch)), share_prefix=share_prefix)
    whole = [(unit, tuple(range(len(size.response_tokens)))) for unit, size in enumerate(units.sizes)]
    plan = [[[piece]] for piece in whole]
    for share in batch.shares(units, plan, [], extra=True):
        for micro_batch in share:
            for laid in (micro_batch, split_shared_prompts(micro_batch)):
                stream = pack(laid, pad_to_multiple=multiple, segment_multiple=multiple)
                routes = stream.extra["routes"]
                is_token = torch.zeros(len(stream.token_ids), dtype=torch.bool)
                for (row, _, _), at in zip(stream.owners, stream.laid, strict=True):
                    sample = batch.samples[row]
                    prompt, response = sample.extra["routes"][: at.prompt_length], sample.extra["routes"][at.prompt_length :]
                    of_prompt, own = routes[at.places].tensor_split([at.prompt_length])
                    np.testing.assert_array_equal(of_prompt[:-1].numpy(), prompt[:-1])
                    np.testing.assert_array_equal(own.numpy(), response[: len(own)])
                    is_token[at.places] = True
                assert bool((routes[~is_token] == 255).all())
    [plain] = batch.shares(units, [[[piece] for piece in whole]], [])
    assert not plain.extra
    assert all(not unit.extra for micro_batch in plain for unit in micro_batch)


@settings(max_examples=20, deadline=None)
@given(samples())
def test_a_sample_comes_back_from_json_with_its_routes(given_samples: list[Sample]) -> None:
    for sample in given_samples:
        back = read_record(Sample, json.loads(json.dumps(sample.to_dict())))
        assert back == sample
        assert back.extra["routes"].dtype == sample.extra["routes"].dtype
        np.testing.assert_array_equal(back.extra["routes"], sample.extra["routes"])
    wide = compact(np.array([[[300, 2]]]), 512)
    np.testing.assert_array_equal(from_json(json.loads(json.dumps(to_json(wide)))), wide)


def test_what_is_missing_is_counted_over_the_tokens_that_are_read() -> None:
    routes = compact(np.array([[[0, 1]], [[0, 1]], [[-1, -1]], [[-1, -1]]]), EXPERTS)
    sample = Sample("s", "g", "r", [1, 2], [3, 4], [1, 1], [0.0, 0.0], [0, 0], "stop", extra={"routes": routes})
    other = Sample("t", "h", "r", [1, 2], [3], [1], [0.0], [0], "stop")
    batch = Batch([sample, other])
    assert missing(batch.extra["routes"]) == pytest.approx(1 - 2 / (3 + 2))
    assert padded(routes[:2], 3).tolist() == [[[0, 1]], [[0, 1]], [[255, 255]]]


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    routes = compact(np.array([[[0, 1]]]), EXPERTS)
    with pytest.raises(ValueError, match="routes must have one entry per token of prompt and response, got 1 for 2"):
        Sample("s", "g", "r", [1], [3], [1], [0.0], [0], "stop", extra={"routes": routes})


def test_routes_of_a_turn_survive_a_file_unless_it_was_cut() -> None:
    group, routes = PartialGroup(), compact(np.arange(6).reshape(3, 1, 2), EXPERTS)
    for reason in ("stop", "abort"):
        group.keep(reason, Generation([4, 5], [-0.5, -0.25], [3, 4], reason, {"routes": routes}))  # type: ignore[arg-type]
    read = PartialGroup.of_dict(json.loads(json.dumps(group.to_dict())))
    whole, cut = read.turn("stop"), read.turn("abort")
    assert whole is not None
    assert cut is not None
    np.testing.assert_array_equal(whole.extra["routes"], routes)
    assert cut.extra == {}


def test_a_response_in_two_pieces_keeps_what_was_chosen_first_under_the_same_weights() -> None:
    first, second = (compact(np.full((n, 1, 2), [k, k + 1]), EXPERTS) for n, k in ((2, 0), (3, 4)))
    begun = Generation([4, 5], [-0.5, -0.25], [3, 3], "length", {"routes": first})
    for version, expected in ((3, [0, 0, 4]), (4, [4, 4, 4])):
        whole = behind(begun, Generation([6], [-0.5], [version], "stop", {"routes": second}))
        assert whole.extra["routes"][:, 0, 0].tolist() == expected
    assert behind(begun, Generation([6], [-0.5], [3], "abort")).extra == {}
