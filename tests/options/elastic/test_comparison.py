"""Which replica is damaged."""

from __future__ import annotations

import pytest

from megarl.config.layout import Layout
from megarl.options.elastic.comparison import differing


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
