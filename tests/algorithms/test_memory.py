"""What the functions allocate beyond their inputs. Every allocation counts, those within a kernel too; nothing is timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megarl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CHOICES,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    Correction,
    LossSettings,
    RunningMean,
    correction,
    kl_per_token,
    masked_whiten,
    mismatch_sums,
    token_weights,
    top_entropies,
    turn_numbers,
    value_loss,
)
from tests.algorithms.batches import given_to, resolved

B, T = 64, 1024
TIMES = 3
"""Peak extra allocation in sizes of the inputs (or of the answer, where that is larger)."""


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes alive at once that were allocated since the call began, its answer among them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        answer = function()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    del answer
    return most


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


GENERATOR = torch.Generator().manual_seed(0)
NOISE = torch.randn(4, B, T, generator=GENERATOR)
MASK = torch.rand(B, T, generator=GENERATOR) < 0.8
GROUPS = torch.arange(B) // 8
ENDS = torch.rand(B, T, generator=GENERATOR) < 1 / 16


def test_the_measure_sees_what_a_kernel_allocates() -> None:
    assert peak_bytes(lambda: NOISE[0].sum(dtype=torch.float64)) >= 8 * B * T
    assert peak_bytes(lambda: NOISE[0] + 1) == pytest.approx(4 * B * T, rel=0.01)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_allocates_at_most_three_times_its_inputs(name: str) -> None:
    binary = (torch.arange(B) % 3 == 0).float()
    inputs = AdvantageInputs(scores=binary, token_penalty=torch.zeros(B, T), mask=MASK, groups=GROUPS)
    read = [inputs.token_penalty, MASK]
    if name == "gae":
        inputs.values = NOISE[0]
        read.append(NOISE[0])
    if name == "grpo_process":
        inputs.step_rewards, inputs.step_ends = NOISE[0], ENDS
        read += [NOISE[0], ENDS]
    if name == "gdpo":
        inputs.rewards_by_source, inputs.reward_weights = {"a": binary}, {"a": 1.0}
    if name == "optimal_token_baseline":
        inputs.old_log_probs, inputs.collision = -NOISE[0].abs(), NOISE[1].abs()
        read += [inputs.old_log_probs, inputs.collision]
    if name in ("turn_rloo", "gigpo"):
        inputs.turns = turn_numbers(MASK)
        inputs.turn_rewards, inputs.states = NOISE[0], inputs.turns
        read += [inputs.turns, inputs.turn_rewards]
    inputs.baseline, inputs.greedy_scores = RunningMean(), binary
    assert peak_bytes(lambda: resolved(name)(inputs)) <= TIMES * size(*read)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weights_allocate_at_most_three_times_their_answer(mode: str) -> None:
    assert peak_bytes(lambda: token_weights(MASK, mode, norm_length=9)) <= TIMES * 4 * B * T


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_correction_allocates_at_most_three_times_its_inputs(mode: str) -> None:
    budget = TIMES * size(NOISE[0], NOISE[1], MASK)
    assert peak_bytes(lambda: correction(NOISE[0], NOISE[1], MASK, [Correction(mode, 0.5, 2.0)])) <= budget
    assert peak_bytes(lambda: mismatch_sums(NOISE[0].flatten(), NOISE[1].flatten())) <= budget


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_policy_loss_allocates_at_most_three_times_its_inputs(name: str) -> None:
    new, old, advantages, _ = NOISE.flatten(1).unbind()
    response = torch.arange(B).repeat_interleave(T)
    new, more = new.clone().requires_grad_(), given_to(name, B * T)
    loss = POLICY_LOSSES.resolve(name)
    used = peak_bytes(
        lambda: loss(new, old, advantages, response=response, settings=LossSettings(), **more)[0].sum().backward()
    )
    assert used <= TIMES * size(new, old, advantages, response)


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_choice_of_tokens_allocates_at_most_three_times_its_inputs(name: str) -> None:
    budget = TIMES * size(NOISE[0], NOISE[1], MASK)
    assert peak_bytes(lambda: CHOICES[name](NOISE[0], NOISE[1], MASK, range(B))) <= budget


def test_the_top_share_of_entropies_allocates_at_most_three_times_its_inputs_and_its_answer() -> None:
    answer = MASK
    assert peak_bytes(lambda: top_entropies(NOISE[0], MASK, 0.2)) <= TIMES * size(NOISE[0], MASK, answer)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_allocates_at_most_three_times_its_inputs(estimator: str, unbiased: bool) -> None:
    new, reference, old, _ = NOISE.flatten(1).unbind()
    new = new.clone().requires_grad_()
    read = [new, reference, old] if unbiased else [new, reference]
    used = peak_bytes(
        lambda: kl_per_token(new, reference, estimator, sampler_log_probs=old if unbiased else None).sum().backward()
    )
    assert used <= TIMES * size(*read)


def test_the_value_loss_allocates_at_most_three_times_its_inputs() -> None:
    values, old, returns, _ = NOISE.flatten(1).unbind()
    values = values.clone().requires_grad_()
    assert peak_bytes(lambda: value_loss(values, old, returns, 0.2)[0].sum().backward()) <= TIMES * size(values, old, returns)


def test_whitening_allocates_at_most_three_times_its_inputs() -> None:
    assert peak_bytes(lambda: masked_whiten(NOISE[0], MASK)) <= TIMES * size(NOISE[0], MASK)
