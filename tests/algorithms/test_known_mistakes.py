"""Each known mistake, written out beside the right formula; the code must be the one and not the other.

Formulas and sources: docs/evidence/methods.md#known-mistakes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageInputs,
    Correction,
    LossSettings,
    correction,
    kl_per_token,
    token_rewards,
    token_weights,
)
from megarl.algorithms.reward_model import pairwise_reward_loss


def check(got: Tensor, right: Tensor, mistake: Tensor) -> None:
    """`got` is `right`, element by element, and the mistake would have shown."""
    torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(mistake, right, rtol=1e-3, atol=1e-6)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def single(scores: list[float], tokens: int, **changes: object) -> AdvantageInputs:
    """Responses of `tokens` sampled tokens, all of one prompt."""
    return AdvantageInputs(
        scores=torch.tensor(scores, dtype=torch.float64),
        token_penalty=torch.zeros(len(scores), tokens, dtype=torch.float64),
        mask=torch.ones(len(scores), tokens, dtype=torch.bool),
        groups=torch.zeros(len(scores), dtype=torch.long),
        **changes,  # type: ignore[arg-type]
    )


def test_k3_has_its_minus_one() -> None:
    policy, reference = draw(2, 50)
    log_ratio = reference - policy
    check(kl_per_token(policy, reference, "k3"), log_ratio.exp() - log_ratio - 1, log_ratio.exp() - log_ratio)
    assert not kl_per_token(policy, policy, "k3").any()


def test_a_sequence_ratio_is_not_divided_by_the_length_twice() -> None:
    """GSPO's sequence loss is −s·A per response; 1/|o| is the weight's, and carried by the token terms once."""
    lengths = torch.tensor([2, 5])
    response = torch.repeat_interleave(torch.arange(2), lengths)
    new, old = 0.01 * draw(7) - 1, torch.full((7,), -1.0, dtype=torch.float64)
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)
    mask = torch.arange(5) < lengths[:, None]
    weights = token_weights(mask, "seq_mean_token_mean").double()[mask]
    wide = LossSettings(clip_low=0.9, clip_high=9.0)
    loss, _ = POLICY_LOSSES.resolve("gspo")(new, old, advantages[response], response=response, settings=wide)
    ratios = torch.stack([(new - old)[response == i].mean().exp() for i in range(2)])
    check((weights * loss).sum(), -(ratios * advantages).mean(), -(ratios * advantages / lengths).mean())


def test_the_reward_models_loss_has_its_minus_sign() -> None:
    chosen, rejected = draw(2, 20, seed=1)
    probability = torch.sigmoid(chosen - rejected)
    check(pairwise_reward_loss(chosen, rejected)[0], -probability.log(), probability.log())


def test_importance_weights_are_the_trainer_over_the_engine() -> None:
    trainer, engine = draw(2, 1, 30, seed=2)
    weights, _, _ = correction(trainer, engine, torch.ones(1, 30, dtype=torch.bool), [Correction("tis_token", 0.0, 1e9)])
    check(weights, (trainer - engine).exp(), (engine - trainer).exp())


def test_gaes_last_term_has_the_power_of_its_distance() -> None:
    tokens, gamma = 6, 0.9
    inputs = single(
        [2.0], tokens, values=torch.zeros(1, tokens, dtype=torch.float64), gamma=gamma, lam=1.0, normalisation="none"
    )
    t = torch.arange(tokens, dtype=torch.float64)
    right, mistake = 2.0 * gamma ** (tokens - 1 - t), torch.full((tokens,), 2.0 * gamma**tokens, dtype=torch.float64)
    check(ADVANTAGES.resolve("gae")(inputs).advantages[0], right, mistake)


def test_the_reward_is_zero_before_the_last_token_and_the_score_at_it() -> None:
    score, greedy = 1.5, 0.25
    inputs = single([score], 4, greedy_scores=torch.tensor([greedy], dtype=torch.float64))
    rewards = token_rewards(inputs.scores, inputs.token_penalty, inputs.mask)
    check(rewards[0], torch.tensor([0, 0, 0, score]).double(), torch.tensor([score, score, score, 0]).double())
    advantages = ADVANTAGES.resolve("remax")(inputs).advantages[0]
    check(advantages, torch.full((4,), score - greedy).double(), torch.tensor([score, score, score, 0]).double() - greedy)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg"])
def test_uneven_groups_are_found_by_number_and_not_by_reshaping(name: str) -> None:
    """Six responses, of which four answer one prompt: reshaped to pairs or threes they would be mixed."""
    inputs = single([1.0, 0.0, 0.0, 1.0, 0.0, 5.0], 1)
    right = torch.zeros(6, dtype=torch.float64)
    groups = torch.tensor([3, 8, 3, 8, 3, 3])
    inputs.groups = groups
    for group in (3, 8):
        alone = single(inputs.scores[groups == group].tolist(), 1)
        right[groups == group] = ADVANTAGES.resolve(name)(alone).advantages[:, 0]
    mixed = torch.cat([ADVANTAGES.resolve(name)(single(inputs.scores[i : i + 3].tolist(), 1)).advantages for i in (0, 3)])
    check(ADVANTAGES.resolve(name)(inputs).advantages[:, 0], right, mixed[:, 0])


def two_ranks(mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """The step's loss as written, as the sum over two uneven ranks with global weights, and with weights of each rank's own."""
    mask = torch.arange(6) < torch.tensor([6, 5, 1, 2, 0])[:, None]
    losses = draw(5, 6, seed=3) + 2
    per_response = [losses[i][mask[i]] for i in range(4)]
    written = {
        "token_mean": torch.cat(per_response).mean(),
        "seq_mean_token_mean": torch.stack([x.mean() for x in per_response]).mean(),
        "seq_mean_token_sum": torch.stack([x.sum() for x in per_response]).mean(),
        "seq_mean_token_sum_norm": torch.stack([x.sum() / 7 for x in per_response]).mean(),
    }[mode]
    ranks = (slice(0, 1), slice(1, 5))
    weights = token_weights(mask, mode, norm_length=7).double()
    ours = sum(((weights[rank] * losses[rank]).sum() for rank in ranks), torch.zeros(()))
    own = [token_weights(mask[rank], mode, norm_length=7).double() for rank in ranks]
    summed = sum(((w * losses[rank]).sum() for w, rank in zip(own, ranks, strict=True)), torch.zeros(()))
    return ours.double(), written, summed


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"])
def test_denominators_are_global_and_no_factor_of_ranks_is_missing(mode: str) -> None:
    """The token mean of micro-batches depends on the split, summed ranks count twice, and their average is no better."""
    ours, written, summed = two_ranks(mode)
    check(ours, written, summed)
    check(ours, written, summed / 2)
