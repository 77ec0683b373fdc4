"""Columns of one optimizer step: over its rows' sampled tokens alone, the same in every order of rows and after a resume."""

from __future__ import annotations

from functools import partial
from zlib import crc32

import pytest
import torch

from megarl.algorithms import CHOICES, top_entropies
from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.experience.experience import Experience, set_loss_weights
from megarl.experience.step_tokens import TOKEN_COLUMNS, loss_arguments, older_tokens
from megarl.experience.token_choices import set_token_columns
from tests.config import smallest
from tests.experience.estimates import estimate

config = partial(
    smallest.config,
    rollout={"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 12},
    rewards=[{"name": "exact_number"}],
)
LENGTHS = [2, 12, 6, 1, 9, 4, 7, 5]
REWARDS = [1.0, 0.0, 0.5, 1.0, -1.0, 2.0, 0.5, 0.0]
CLIP_COV = "algorithm={policy_loss: clip_cov, policy_loss_args: {share: 0.2, low: 0.01, high: 4}}"
KL_COV = "algorithm={policy_loss: kl_cov, policy_loss_args: {share: 0.2, coef: 0.5}, mini_batches: 2}"
TOP = "algorithm.entropy.top_share=0.2"
NLL = "algorithm.positive_nll={coef: 0.1, threshold: 0.5}"


def batch() -> Batch:
    """Eight responses with tool tokens (every fourth) and what a step knows before its updates."""
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(
            f"{number}", f"g{number // 2}", f"g{number // 2}", [1], [5] * length,
            [int(t % 4 != 2) for t in range(length)], [-1.0] * length, [0] * length, "stop",
        )
        for number, length in enumerate(LENGTHS)
    ]  # fmt: skip
    made = Batch(samples)
    for name in ("old_log_probs", "rollout_log_probs", "old_entropy", "advantages"):
        made.columns[name] = torch.randn(made.mask.shape, generator=generator)
    made.columns["old_entropy"] = torch.where(made.mask, made.columns["old_entropy"].abs(), 50.0)
    return made


def made(rows: list[int], *overrides: str, number: int = 3) -> Batch:
    step = batch()
    set_token_columns(step, rows, config(*overrides), rewards=REWARDS, update_number=number)
    return step


def mask_of(step: Batch, rows: list[int]) -> torch.Tensor:
    return step.mask & torch.isin(torch.arange(len(step)), torch.tensor(rows))[:, None]


def test_nothing_is_made_that_nobody_reads() -> None:
    assert not set(made([0, 1, 2, 3]).columns) & set(TOKEN_COLUMNS)


@pytest.mark.parametrize(
    ("override", "column"),
    [
        (CLIP_COV, "old_log_probs"),
        (KL_COV, "old_log_probs"),
        (f"{CLIP_COV[:-1]}, rollout_correction: {{mode: bypass}}}}", "rollout_log_probs"),
    ],
)
def test_chosen_tokens_are_those_of_the_choice_over_the_rows_of_the_step(override: str, column: str) -> None:
    """By the log-probs that the ratio is to; rows of other updates take no part."""
    rows = [6, 1, 4, 0]
    step, algorithm = made(rows, override), config(override).algorithm
    arguments = {name: value for name, value in algorithm.policy_loss_args.items() if name != "coef"}
    seeds = [crc32(f"{config().run.seed} 3 {number}".encode()) for number in range(len(LENGTHS))]
    mask = mask_of(step, rows)
    want = CHOICES[algorithm.policy_loss](step.columns[column], step.columns["advantages"], mask, seeds, **arguments)
    assert torch.equal(step.columns["chosen"], want.float())
    assert step.columns["chosen"].sum() == int(0.2 * mask.sum())
    assert not step.columns["chosen"][~mask].any()


def test_a_pick_is_the_same_in_every_order_of_rows_and_another_in_the_next_update_and_under_another_seed() -> None:
    rows = [0, 1, 4, 5, 6, 7]
    first = made(rows, CLIP_COV).columns["chosen"]
    assert torch.equal(made(rows[::-1], CLIP_COV).columns["chosen"], first)
    assert not torch.equal(made(rows, CLIP_COV, number=4).columns["chosen"], first)
    assert not torch.equal(made(rows, CLIP_COV, "run.seed=7").columns["chosen"], first)


def test_only_the_top_share_of_entropies_of_the_step_counts() -> None:
    rows = [1, 2, 4]
    step = made(rows, TOP)
    mask = mask_of(step, rows)
    assert torch.equal(step.columns["top_entropy"], top_entropies(step.columns["old_entropy"], mask, 0.2).float())
    assert step.columns["top_entropy"].sum() == int(0.2 * mask.sum())


def test_right_responses_are_those_of_the_step_with_a_reward_above_the_threshold() -> None:
    step = made([0, 1, 2, 5, 6], NLL)
    weights = step.columns["nll_weights"]
    right = mask_of(step, [0, 5])  # rewards 1 and 2; 0.5 is not above 0.5, and row 3 is of another update
    torch.testing.assert_close(weights, right / right.sum(), rtol=1e-6, atol=0)
    assert not made([1, 2], NLL).columns["nll_weights"].any()


def test_a_response_that_left_the_mask_is_no_right_one() -> None:
    step = batch()
    step.mask[5] = False
    set_token_columns(step, [0, 5], config(NLL), rewards=REWARDS, update_number=0)
    assert step.columns["nll_weights"][5].sum() == 0
    assert step.columns["nll_weights"].sum() == 1


def test_the_loss_is_given_its_own_numbers_and_not_those_of_the_choice() -> None:
    assert loss_arguments(config(KL_COV).algorithm) == {"coef": 0.5}
    assert loss_arguments(config(CLIP_COV).algorithm) == {}
    sapo = config("algorithm={policy_loss: sapo, policy_loss_args: {tau_positive: 2}}").algorithm
    assert loss_arguments(sapo) == {"tau_positive": 2}


@pytest.mark.parametrize("override", [CLIP_COV, TOP, "algorithm.entropy.target=0.5"])
def test_what_is_read_before_the_update_asks_for_the_pass(override: str) -> None:
    assert not config().needs_old_log_probs
    assert config(override).needs_old_log_probs
    assert not config(NLL).needs_old_log_probs


@pytest.mark.parametrize("mask", [False, True])
def test_tokens_of_older_weights_are_counted_and_left_out_of_losses_if_they_are_to_be(mask: bool) -> None:
    step, rows = batch(), list(range(8))
    for sample in step.samples:
        cut = len(sample.response_ids) // 2
        sample.weight_versions[:] = [6] * cut + [7] * (len(sample.response_ids) - cut)
    step.samples[3].weight_versions[:] = [6]
    of_policy = step.mask.clone()
    older = torch.zeros_like(of_policy)
    for row, length in enumerate(LENGTHS):
        older[row, : 1 if row == 3 else length // 2] = True
    assert older_tokens(step, 7, mask=mask) == {"rollout/older_tokens": float((older & of_policy).sum())}
    settings = config()
    before = step.mask.clone()
    estimate(Experience(settings), step, REWARDS, None)
    assert step.mask.equal(before & ~older if mask else before)
    set_loss_weights(step, rows, settings)
    trained = before & ~older if mask else before
    responses, tokens = trained.any(1).sum(), trained.sum(1, keepdim=True)
    weights = {"token_mean": 1 / trained.sum(), "seq_mean_token_mean": 1 / (responses * tokens)}[settings.algorithm.aggregation]
    assert torch.allclose(step.columns["weights"], torch.where(trained, weights, 0.0))
    plain = batch()
    estimate(Experience(settings), plain, REWARDS, None)
    assert step.columns["advantages"].equal(plain.columns["advantages"]), "a masked token still counts in what is compared"
