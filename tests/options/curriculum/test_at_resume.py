"""Stages and orders go on as steps and rows grow at resume."""

from __future__ import annotations

from megarl.data.sampler import RowSampler
from megarl.options.curriculum.order import row_order
from tests.config import smallest
from tests.data.test_row_changes import prompts, state_after


def test_stages_are_counted_in_steps_whatever_a_step_takes() -> None:
    """A stage of four steps: after two steps of two rows, two steps of four rows are left."""
    data = smallest.config("data.curriculum={key: level, stages: [{steps: 4, max: 1}, {min: 2}]}").data
    small = RowSampler(prompts(40), 0, order=row_order(data), rows_per_step=2)
    state = state_after(small, 4)
    large = RowSampler(prompts(40), 0, order=row_order(data), rows_per_step=4)
    large.load_state_dict(state)
    levels = [row.row["level"] for row in large.next(12)]
    assert max(levels[:8]) <= 1
    assert min(levels[8:]) >= 2


def test_a_curriculum_s_new_rows_follow_in_its_order() -> None:
    data = smallest.config("data.curriculum={key: level, order: ascending}").data
    state = state_after(RowSampler(prompts(6), 0, order=row_order(data)), 2)
    grown = RowSampler(prompts(14), 0, order=row_order(data))
    grown.load_state_dict(state, "append")
    rest = grown.next(12)
    assert {row.row_id for row in rest[:4]} < {f"train-{n}" for n in range(6)}
    assert [row.row["level"] for row in rest[4:]] == sorted(row.row["level"] for row in rest[4:])
