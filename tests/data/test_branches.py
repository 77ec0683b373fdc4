"""An episode of several branches is one row for the maths: the gradient's weights are those of the same tokens in one
response."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.algorithms.aggregation import token_weights
from megarl.data.batch import Batch
from megarl.data.branches import JoinedEpisodes, episode_rows, first_branches, spread_rewards
from megarl.data.sample import Sample


def sample(name: str, mask: list[int], branch_of: str = "", group: str = "g") -> Sample:
    size = len(mask)
    return Sample(
        name, group, group, [1, 2], list(range(size)), mask, [-0.5 * n for n in mask], [0] * size, "stop", branch_of=branch_of
    )


SAMPLES = [
    sample("g/0", [1, 1, 0, 1]),
    sample("g/0+1", [0, 0, 0, 1, 1], branch_of="g/0"),
    sample("g/1", [1, 1]),
    sample("h/0", [1], group="h"),
    sample("h/0+1", [0, 1, 1], branch_of="h/0", group="h"),
    sample("h/0+2", [1, 0, 1], branch_of="h/0", group="h"),
]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"])
def test_weights_of_branches_are_those_of_one_response_with_their_tokens(aggregation: str) -> None:
    """Written out: the sampled tokens of each episode as one response, weighted, and handed out in order."""
    batch = Batch(SAMPLES)
    episodes = JoinedEpisodes(batch)
    episodes.batch.columns["weights"] = token_weights(episodes.batch.mask, aggregation, norm_length=10)
    episodes.split(["weights"])
    counts = [5, 2, 5]
    whole = torch.zeros(3, max(counts), dtype=torch.bool)
    for row, tokens in enumerate(counts):
        whole[row, :tokens] = True
    wanted = token_weights(whole, aggregation, norm_length=10)
    for rows, expected, tokens in zip(episode_rows(SAMPLES), wanted, counts, strict=True):
        given = torch.cat([batch.columns["weights"][row][batch.mask[row]] for row in rows])
        assert given.tolist() == expected[:tokens].tolist()
    assert (batch.columns["weights"][~batch.mask] == 0).all()


def test_columns_and_mask_come_back_token_for_token() -> None:
    batch = Batch(SAMPLES)
    numbers = torch.rand(batch.mask.shape)
    beyond = torch.arange(batch.mask.shape[1])[None] >= batch.lengths[:, None]
    numbers[beyond] = 0
    batch.columns |= {"a": numbers.clone(), "b": torch.rand(*batch.mask.shape, 3) * ~beyond[..., None]}
    before, wide = batch.mask.clone(), batch.columns["b"].clone()
    episodes = JoinedEpisodes(batch)
    assert episodes.rows == [[0, 1], [2], [3, 4, 5]]
    assert episodes.batch.groups.tolist() == [0, 0, 1]
    assert episodes.batch.mask.sum(1).tolist() == [5, 2, 5]
    episodes.batch.columns["a"] *= 2
    episodes.batch.mask[0] = False
    episodes.split()
    assert torch.equal(batch.columns["a"], 2 * numbers)
    assert torch.equal(batch.columns["b"], wide)
    assert not batch.mask[:2].any()
    assert torch.equal(batch.mask[2:], before[2:])


def test_without_branches_the_batch_is_the_same_object() -> None:
    batch = Batch([replace(one, branch_of="") for one in SAMPLES])
    assert JoinedEpisodes(batch).batch is batch
    assert JoinedEpisodes(Batch(SAMPLES), apart=True).is_plain


def test_a_reward_is_of_the_whole_episode() -> None:
    firsts = first_branches(SAMPLES)
    assert [one.sample_id for one in firsts] == ["g/0", "g/1", "h/0"]
    for one, reward in zip(firsts, (1.0, 2.0, 3.0), strict=True):
        one.rewards = {"judge": reward}
    assert spread_rewards(SAMPLES, [1.0, 2.0, 3.0]) == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert SAMPLES[5].rewards == {"judge": 3.0}
