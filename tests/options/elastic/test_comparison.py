"""Which replica is damaged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.layout import Layout
from megarl.options.elastic.comparison import differing, digests_of_weights


@pytest.mark.parametrize(
    ("layout", "digests", "found"),
    [
        (Layout(dp=3), [(1, 0), (1, 0), (1, 0)], []),
        (Layout(dp=3), [(1, 0), (2, 0), (1, 0)], [1]),
        (Layout(dp=2), [(1, 0), (2, 0)], [0, 1]),  # nobody knows which
        (Layout(tp=2, dp=3), [(1, 0), (2, 0), (1, 0), (2, 0), (1, 0), (3, 0)], [5]),
        (Layout(cp=2, dp=2), [(1, 0), (1, 0), (1, 0), (7, 0)], [3]),
        (Layout(pp=2, dp=3), [(1, 0), (1, 0), (1, 0), (2, 0), (2, 0), (9, 0)], [5]),
        (Layout(ep=2, dp=6), [(1, 5), (1, 6), (1, 5), (1, 6), (1, 5), (1, 8)], [5]),  # an expert's weight
    ],
)
def test_a_rank_that_most_of_its_replicas_do_not_agree_with_is_named(
    layout: Layout, digests: list[tuple[int, int]], found: list[int]
) -> None:
    assert differing(layout, digests) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_a_weight_shows_in_the_digest_of_its_kind(dtype: torch.dtype) -> None:
    chunk = torch.nn.ParameterList([torch.randn(3, 5).to(dtype), torch.ones((), dtype=dtype), torch.randn(2, 4).to(dtype).T])
    chunk[1].allreduce = False  # type: ignore[attr-defined]  # an expert's, as megatron-core marks it
    model: Any = SimpleNamespace(chunks=[chunk])
    whole = digests_of_weights(model)
    assert digests_of_weights(model) == whole
    for number, weight in enumerate(chunk):
        flat = weight.detach().reshape(-1).clone()
        flat.view(torch.uint8)[0] ^= 1
        before, weight.data = weight.data, flat.view(weight.shape)
        now = digests_of_weights(model)
        assert [now[kind] != whole[kind] for kind in (0, 1)] == [number != 1, number == 1]
        weight.data = before
    assert digests_of_weights(model) == whole
