"""Scores of a process reward model: which tokens end steps, and what becomes of their scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.errors import RewardError
from megarl.options.reward_model.run import ModelRewards
from megarl.options.reward_model.section import RewardModelConfig

LINE = 9
"""The token that is a line break."""
SCORES = {0: 0.2, 1: 0.9, 2: 0.7, 3: 0.4, 4: 0.1, 5: 0.6, 6: 0.3}


class Spelling:
    """A tokenizer of digits and one line break."""

    def decode(self, ids: list[int]) -> str:
        return "\n" if ids == [LINE] else "x"


class Scores:
    """Roles whose reward model gives the k-th token of a response the logit of SCORES[k]; `at` is kept."""

    def forward(self, role: str, batch: Batch, names: list[str], *, at: torch.Tensor) -> None:
        self.at = at
        scores = torch.tensor([SCORES[place] for place in range(at.shape[1])])
        batch.columns["score"] = torch.where(at, scores.logit(), 0)


def sample(ids: list[int], sampled: list[int]) -> Sample:
    zeros = [0.0] * len(ids)
    return Sample("s", "g", "r", [1], ids, sampled, zeros, [0] * len(ids), "stop")


def scored(how: str, weight: float = 1.0) -> tuple[ModelRewards, Scores, list[float], Sample]:
    """One response: a line of its own, a tool's line, and a last line that a tool's text follows."""
    response = sample([1, LINE, 2, LINE, 3, 4, LINE], [1, 1, 0, 0, 1, 1, 0])
    config = RewardModelConfig(path="x", per_step=True, step_aggregation=how, weight=weight)  # type: ignore[arg-type]
    rewards, roles = ModelRewards(config, Spelling()), Scores()
    totals = rewards.score(roles, [response])  # type: ignore[arg-type]
    return rewards, roles, totals, response


@pytest.mark.parametrize(("how", "total"), [("mean", 0.75), ("min", 0.6), ("product", 0.54), ("last", 0.6)])
def test_lines_that_tools_wrote_are_no_steps_of_the_policy(how: str, total: float) -> None:
    _, roles, totals, response = scored(how, weight=2.0)
    assert roles.at.nonzero()[:, 1].tolist() == [1, 5]
    assert totals == pytest.approx([2 * total])
    assert response.rewards["reward_model"] == pytest.approx(total)


def test_what_other_sources_gave_stands_at_the_last_step_that_the_policy_wrote() -> None:
    rewards, _, totals, response = scored("mean")
    batch: Any = Batch([response])
    rewards.take_rewards(batch, [totals[0] + 5.0])
    assert batch.columns["step_ends"][0].nonzero()[:, 0].tolist() == [1, 5]
    assert batch.columns["step_rewards"][0, [1, 5]].tolist() == pytest.approx([0.9, 5.6])


def test_a_score_that_is_no_number_names_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORES, 5, float("nan"))
    with pytest.raises(RewardError, match=r"reward_model gave nan to sample s; it must be a finite number"):
        scored("mean")
