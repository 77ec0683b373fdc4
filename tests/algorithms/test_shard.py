"""A step's maths on shards of its rows: element by element, and bit for bit, what it is where all rows are in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CHOICES,
    CORRECTIONS,
    AdvantageInputs,
    AdvantageOutputs,
    Correction,
    RunningMean,
    correction,
    covariance,
    masked_whiten,
    rewards_of_turns,
    row_weights,
    token_weights,
    top_entropies,
    turn_numbers,
)
from megarl.algorithms.catalogue import CORRECTION_BOUNDS, NORMALISATIONS
from megarl.algorithms.shard import Shard, row_sums
from megarl.algorithms.user_algorithms import estimator_needs
from tests.algorithms.batches import resolved
from tests.algorithms.sharded import Meeting, narrowed, put_together, split_groups

SPLITS = (1, 2, 3, 5)
B, T = 23, 150


def batch(seed: int, **changes: Any) -> AdvantageInputs:
    """Groups of one to five responses in mixed order, of very different lengths and with tool tokens between turns; some
    groups are tied and some rows empty. Every second batch is in float64, where an order of additions shows."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64 if seed % 2 else torch.float32)

    lengths = (T * uniform(B) ** 3).long() + 1
    lengths[:2] = torch.tensor([0, T])
    mask = (torch.arange(T) < lengths[:, None]) & (uniform(B, T) < 0.85)
    groups = torch.randint(0, 7, (B,), generator=generator) * 3
    groups[5] = 50  # alone
    groups[6:9] = 51  # tied
    scores = torch.randint(0, 3, (B,), generator=generator) / 3 + (uniform(B) < 0.3) * uniform(B)
    scores[6:9] = 1 / 3
    token_penalty = -0.1 * uniform(B, T) * mask
    token_penalty[6:9] = 0
    turns = turn_numbers(mask)
    given = (torch.randint(0, 3, (B, T), generator=generator) / 7).tolist()
    states = torch.randint(0, 3, (B, T), generator=generator)
    log_probs = -3 * uniform(B, T)
    ends = (uniform(B, T) < 0.2) | (torch.arange(T) == lengths[:, None] - 1)
    inputs = AdvantageInputs(
        scores=scores,
        token_penalty=token_penalty,
        mask=mask,
        groups=groups,
        values=uniform(B, T),
        truncated=uniform(B) < 0.4,
        gamma=0.97,
        lam=0.93,
        bootstrap_truncated=True,
        bootstrap_values=uniform(B),
        baseline=RunningMean(3, 0.123),
        greedy_scores=uniform(B),
        step_rewards=uniform(B, T) * ends,
        step_ends=ends,
        rewards_by_source={"a": scores, "b": uniform(B)},
        reward_weights={"a": 0.7, "b": 0.3},
        turns=turns,
        turn_rewards=rewards_of_turns(scores, turns, given),
        states=torch.where(mask, states.gather(1, turns.clamp(min=0)), -1),
        rollout_log_probs=log_probs + 0.3 * (uniform(B, T) - 0.5),
        old_log_probs=log_probs,
        entropy=(uniform(B, T) * 20).round() / 20,
        collision=log_probs.exp() ** 2,
    )
    return dataclasses.replace(inputs, **changes)


def of_shard(inputs: AdvantageInputs, rows: Tensor, shard: Shard) -> AdvantageInputs:
    """These rows, with columns no wider than they need."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cut(one) for name, one in value.items()}
        if not isinstance(value, Tensor):
            return value
        return value[rows] if value.dim() == 1 else narrowed(value, rows, inputs.mask)

    fields = {field.name: cut(getattr(inputs, field.name)) for field in dataclasses.fields(inputs)}
    return AdvantageInputs(**fields | {"shard": shard})


def identical(parts: list[Tensor], rows: list[Tensor], whole: Tensor) -> None:
    """Bit for bit what `whole` `[B]` or `[B, T]` is."""
    if whole.dim() == 1:
        parts, whole = [part[:, None] for part in parts], whole[:, None]
    assert torch.equal(put_together(parts, rows, whole.shape[1]), whole)


@pytest.mark.parametrize("normalisation", [None, *NORMALISATIONS])
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_estimator_answers_a_shard_what_it_answers_the_whole_batch(name: str, normalisation: str | None) -> None:
    for seed in range(3):
        inputs = batch(seed, normalisation=normalisation, unbiased=bool(seed % 2))
        whole = resolved(name)(inputs)
        assert whole.advantages.abs().sum() > 0
        for parts in SPLITS:
            rows = split_groups(inputs.groups, parts, seed)
            meeting = Meeting(rows)

            def one(own: Tensor, shard: Shard, inputs: AdvantageInputs = inputs) -> AdvantageOutputs:
                return resolved(name)(of_shard(inputs, own, shard))

            answers = meeting.run(one)
            for field in ("advantages", "returns", "dropped"):
                value = getattr(whole, field)
                if value is not None:
                    identical([getattr(answer, field) for answer in answers], rows, value)
            assert all(answer.baseline == whole.baseline for answer in answers)
            assert meeting.most_numbers <= 1


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("centre", [False, True])
def test_whitening_is_over_the_tokens_of_all_shards(centre: bool, groups: bool) -> None:
    inputs = batch(3)
    x, mask = inputs.token_penalty, inputs.mask
    whole = masked_whiten(x, mask, centre=centre, groups=inputs.groups if groups else None)
    for parts in SPLITS:
        rows = split_groups(inputs.groups, parts, 3)

        def one(own: Tensor, shard: Shard) -> Tensor:
            number = inputs.groups[own] if groups else None
            return masked_whiten(narrowed(x, own, mask), narrowed(mask, own, mask), centre=centre, groups=number, shard=shard)

        identical(Meeting(rows).run(one), rows, whole)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("modes", [*((mode,) for mode in CORRECTIONS), ("tis_token", "reject_sequence")])
def test_a_correction_is_that_of_the_whole_batch(modes: tuple[str, ...], normalise: bool) -> None:
    weights_of_tokens = [mode for mode in modes if mode.startswith(("tis", "mis"))]
    rules = [Correction(mode, *CORRECTION_BOUNDS[mode], normalise and mode in weights_of_tokens) for mode in modes]
    for seed in range(3):
        inputs = batch(seed)
        old, rollout = inputs.old_log_probs, inputs.rollout_log_probs
        assert old is not None
        assert rollout is not None
        weights, kept, figures = correction(old, rollout, inputs.mask, rules)
        for parts in SPLITS:
            rows = split_groups(inputs.groups, parts, seed)

            def one(own: Tensor, shard: Shard, mask: Tensor = inputs.mask, old: Tensor = old, other: Tensor = rollout) -> Any:
                return correction(narrowed(old, own, mask), narrowed(other, own, mask), narrowed(mask, own, mask), rules, shard)

            answers = Meeting(rows).run(one)
            identical([answer[0] for answer in answers], rows, weights)
            identical([answer[1] for answer in answers], rows, kept)
            assert all(answer[2] == figures for answer in answers)


def choices_of(inputs: AdvantageInputs, seed: int) -> dict[str, Callable[[Tensor, Shard], Tensor]]:
    """By name, a choice of the rows `[b]` of a shard."""
    mask, entropy, advantages = inputs.mask, inputs.entropy, resolved("grpo")(inputs).advantages
    log_probs = inputs.old_log_probs
    assert log_probs is not None
    assert entropy is not None
    log_probs = (log_probs * 10).round() / 10  # so that covariances of different responses are tied
    seeds = torch.arange(len(mask)) // 2 + 1000 * seed  # equal draws of different responses, too

    def pick(name: str, **numbers: float) -> Callable[[Tensor, Shard], Tensor]:
        def one(own: Tensor, shard: Shard) -> Tensor:
            columns = (narrowed(column, own, mask) for column in (log_probs, advantages, mask))
            return CHOICES[name](*columns, seeds[own].tolist(), shard, **numbers)

        return one

    return {
        "kl_cov": pick("kl_cov", share=0.07),
        "kl_cov of one": pick("kl_cov", share=1e-6),
        "clip_cov": pick("clip_cov", share=0.05, low=-0.3, high=0.4),
        "clip_cov of all": pick("clip_cov", share=1.0, low=-0.3, high=0.4),
        "clip_cov of none": pick("clip_cov", low=1e6, high=1e7),
        "entropies": lambda own, shard: top_entropies(narrowed(entropy, own, mask), narrowed(mask, own, mask), 0.1, shard),
        "entropies in float64": lambda own, shard: top_entropies(
            narrowed(entropy, own, mask).double(), narrowed(mask, own, mask), 0.3, shard
        ),
    }


@pytest.mark.parametrize("name", sorted(choices_of(batch(0), 0)))
def test_a_choice_of_tokens_is_that_of_the_whole_batch(name: str) -> None:
    assert {one.partition(" ")[0] for one in choices_of(batch(0), 0)} >= CHOICES.keys()
    for seed in range(3):
        inputs = batch(seed)
        choose = choices_of(inputs, seed)[name]
        whole = choose(torch.arange(B), Shard())
        assert whole.any() == (name != "clip_cov of none")
        for parts in SPLITS:
            rows = split_groups(inputs.groups, parts, seed)
            identical(Meeting(rows).run(choose), rows, put_together([whole], [torch.arange(B)], T))


def test_covariances_are_about_the_means_of_all_shards() -> None:
    inputs = batch(4)
    mask, advantages, log_probs = inputs.mask, inputs.values, inputs.old_log_probs
    assert advantages is not None
    assert log_probs is not None
    whole = torch.zeros(B, T, dtype=torch.float64)
    whole[mask] = covariance(log_probs, advantages, mask)
    for parts in SPLITS:
        rows = split_groups(inputs.groups, parts)

        def one(own: Tensor, shard: Shard) -> Tensor:
            columns = [narrowed(column, own, mask) for column in (log_probs, advantages, mask)]
            found = torch.zeros(columns[2].shape, dtype=torch.float64)
            found[columns[2]] = covariance(*columns, shard)
            return found

        identical(Meeting(rows).run(one), rows, whole)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_loss_weights_have_the_denominators_of_all_shards_and_need_numbers_of_tokens_alone(mode: str) -> None:
    inputs = batch(1)
    mask = inputs.mask
    whole = token_weights(mask, mode, norm_length=77)
    of_rows = row_weights(mask.sum(1), mode, norm_length=77)
    assert torch.equal(torch.where(mask, of_rows[:, None], 0), whole)
    assert of_rows[mask.sum(1) == 0].tolist() == [0.0] * int((mask.sum(1) == 0).sum())
    for parts in SPLITS:
        rows = split_groups(inputs.groups, parts)

        def one(own: Tensor, shard: Shard) -> Tensor:
            return token_weights(narrowed(mask, own, mask), mode, norm_length=77, shard=shard)

        identical(Meeting(rows).run(one), rows, whole)


@pytest.mark.parametrize("width", [0, 1, 2, 5, 127, 128, 129, 400])
def test_row_sums_are_sums_and_know_nothing_of_padding_and_other_rows(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(7, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(7, width, generator=generator) < 0.7
    sums = row_sums(x, mask)
    torch.testing.assert_close(sums, torch.where(mask, x, 0).double().sum(1), rtol=1e-12, atol=1e-12)
    wide = torch.cat([torch.where(mask, x, 0), x.new_zeros(7, 131)], 1)
    assert torch.equal(row_sums(wide), sums)
    assert all(torch.equal(row_sums(x[row : row + 1], mask[row : row + 1]), sums[row : row + 1]) for row in range(7))


def test_a_batch_without_a_sampled_token_is_zero_in_every_shard() -> None:
    nothing = torch.zeros(B, T, dtype=torch.bool)
    inputs = batch(0, mask=nothing, turns=torch.full((B, T), -1))
    rows = split_groups(inputs.groups, 3)
    for name in sorted(ADVANTAGES):

        def one(own: Tensor, shard: Shard, name: str = name) -> Tensor:
            return resolved(name)(of_shard(inputs, own, shard)).advantages

        assert not any(part.any() for part in Meeting(rows).run(one))


def test_only_an_estimator_that_says_so_needs_the_whole_batch(tmp_path: Any) -> None:
    path = tmp_path / "own.py"
    functions = ["@needs(whole_batch=True)", "def all_rows(inputs): ...", "def some_rows(inputs): ..."]
    path.write_text("\n".join(["from megarl.algorithms import needs", *functions]))
    assert estimator_needs(f"{path}:all_rows").whole_batch
    assert not estimator_needs(f"{path}:some_rows").whole_batch
    assert not any(estimator_needs(name).whole_batch for name in ADVANTAGES)
