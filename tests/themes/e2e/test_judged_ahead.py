"""A run whose responses are judged while others are sampled learns what it learns when they are judged at the step's end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Config
from megarl.data.sample import Sample
from tests.themes.e2e.test_async import run

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def share_of_digits(sample: Sample) -> float:
    """Digits over characters, of one response."""
    return sum(character.isdigit() for character in sample.response_text) / max(len(sample.response_text), 1)


def test_the_numbers_are_those_of_a_run_that_judges_at_the_end(tiny_config: Callable[..., Config]) -> None:
    counts, learned = [], []
    for ahead in (None, False):
        rewards = [
            {"name": f"{Path(__file__)}:share_of_digits", "ahead": ahead},
            {"name": "format_regex", "weight": 0.5, "args": {"pattern": "[0-9].*"}, "ahead": ahead},
        ]
        own = {"run.name": f"ahead-{ahead}", "run.steps": 3, "rewards": rewards, "data.eval": None}
        # a request of each group, of which the engine computes one after the other
        more = {"rollout.samples_per_prompt": 32, "rollout.max_new_tokens": 24, "rollout.ignore_eos": True}
        metrics, samples = run(tiny_config(**own, **more))
        counts.append([row["speed/judged_ahead"] for row in metrics])
        keys = ("step", "sample_id", "response_ids", "rewards", "training")
        learned.append(sorted(([sample[key] for key in keys] for sample in samples), key=lambda row: row[:2]))
    assert counts[1] == [0, 0, 0]
    assert min(counts[0]) >= 32, "a group at least"
    assert len(learned[0]) == 3 * 4 * 32
    assert learned[0] == learned[1]
