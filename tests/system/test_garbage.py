"""Collections of garbage in a process that has many objects."""

from __future__ import annotations

import gc

from megarl.system.garbage import collect_rarely


def collections() -> int:
    """How many are made while 100,000 objects are."""
    before = sum(generation["collections"] for generation in gc.get_stats())
    kept = [[number] for number in range(100_000)]
    assert len(kept) == 100_000
    return sum(generation["collections"] for generation in gc.get_stats()) - before


def test_collections_are_rare_and_spare_what_lived_before() -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)  # Python's, whatever this process has set before
        often = collections()
        collect_rarely()
        assert gc.get_freeze_count() > 1_000
        assert collections() <= often / 20
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
