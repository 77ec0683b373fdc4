"""What every loss promises: the sum over its parts is the whole, in any order, and rows without sampled tokens add nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import AGGREGATIONS, POLICY_LOSSES, LossSettings, catalogue, token_weights, value_loss
from megarl.algorithms.preference import PREFERENCE_LOSSES, PreferenceSettings, bco, kto
from megarl.algorithms.reward_model import pairwise_reward_loss, process_reward_loss

ROWS, T = 7, 5
PAIRS = PreferenceSettings(
    beta=0.3,
    label_smoothing=0.1,
    rpo_alpha=0.2,
    length_normalised=True,
    reward_shift=0.2,
    mixture={"bco_pair": 0.4, "sft": 0.7},
)


def pair_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    def loss(x: Tensor, *others: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rejected, ref_chosen, ref_rejected, tokens = others
        lengths = tokens.abs().ceil() + 1
        return PREFERENCE_LOSSES.resolve(name)(
            x, rejected, ref_chosen, ref_rejected, chosen_tokens=lengths, rejected_tokens=lengths + 1, settings=PAIRS
        )

    return loss


PER_ITEM: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    **{name: pair_loss(name) for name in PREFERENCE_LOSSES},
    "kto": lambda x, ref, kind, *_: kto(x, ref, kind > 0, torch.tensor(0.3), PAIRS),
    "bco": lambda x, ref, kind, *_: bco(x, ref, kind > 0, PAIRS),
    "reward_model": lambda x, rejected, margin, *_: pairwise_reward_loss(x, rejected, margin),
    "process_reward_model": lambda x, label, *_: process_reward_loss(x, label.sigmoid()),
    "value": lambda x, old, returns, *_: value_loss(x, old, returns, 0.2),
}
SPLIT = st.tuples(st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS), st.permutations(range(ROWS)), st.integers(0, 99))


def parts_of(assignment: list[int], order: list[int]) -> list[list[int]]:
    """Four micro-batches, some of them perhaps empty."""
    return [[row for row in order if assignment[row] == part] for part in range(4)]


@pytest.mark.parametrize("name", sorted(PER_ITEM))
@settings(max_examples=25, deadline=None)
@given(drawn=SPLIT)
def test_an_items_loss_gradient_and_sums_do_not_depend_on_its_micro_batch(
    name: str, drawn: tuple[list[int], list[int], int]
) -> None:
    assignment, order, seed = drawn
    data = torch.randn(5, ROWS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    leaf = data[0].clone().requires_grad_()
    whole, sums = PER_ITEM[name](leaf, *data[1:])
    (gradient,) = torch.autograd.grad(whole.sum(), leaf)
    assert whole.shape == (ROWS,)
    assert all(value.ndim == 0 and not value.requires_grad for value in sums.values())
    totals = dict.fromkeys(sums, 0.0)
    for rows in parts_of(assignment, order):
        part = data[0][rows].clone().requires_grad_()
        loss, part_sums = PER_ITEM[name](part, *(x[rows] for x in data[1:]))
        torch.testing.assert_close(loss, whole[rows], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), part)[0], gradient[rows], rtol=1e-12, atol=1e-14)
        for key, value in part_sums.items():
            totals[key] += value.item()
    assert totals == pytest.approx({key: value.item() for key, value in sums.items()}, rel=1e-5, abs=1e-5)


def step(name: str, mode: str, rows: list[int], data: dict[str, Tensor]) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient by row and sums of one call over `rows`, with the weights of the whole step."""
    leaf = data["new"].clone().requires_grad_()
    mask = data["mask"][rows]
    weights = token_weights(data["mask"], mode, norm_length=9).double()[rows][mask]
    response = torch.arange(len(rows))[:, None].expand_as(mask)[mask]
    more = {"chosen": data["chosen"][rows][mask]} if catalogue.POLICY_LOSSES[name].choice else {}
    loss, sums = POLICY_LOSSES.resolve(name)(
        leaf[rows][mask],
        data["old"][rows][mask],
        data["advantages"][rows][mask],
        response=response,
        settings=LossSettings(),
        **more,
    )
    total = (weights * loss).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.item(), gradient, {key: value.item() for key, value in sums.items()}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@settings(max_examples=15, deadline=None)
@given(drawn=SPLIT, empty=st.integers(1, 4))
def test_a_policy_step_is_the_sum_of_its_parts_and_rows_without_tokens_add_nothing(
    name: str, mode: str, drawn: tuple[list[int], list[int], int], empty: int
) -> None:
    assignment, order, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(ROWS, T, generator=generator) < torch.rand(ROWS, 1, generator=generator)
    noise = torch.randn(3, ROWS, T, generator=generator, dtype=torch.float64)
    data = {"new": noise[0] - 2, "old": noise[0] - 2 + 0.3 * noise[1], "advantages": noise[2], "mask": mask}
    data["chosen"] = (torch.rand(ROWS, T, generator=generator) < 0.3).double()
    loss, gradient, sums = step(name, mode, list(range(ROWS)), data)
    parts = [step(name, mode, rows, data) for rows in parts_of(assignment, order)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-11, abs=1e-13)
    torch.testing.assert_close(sum(part[1] for part in parts), gradient, rtol=1e-11, atol=1e-14)
    for key, value in sums.items():
        assert sum(part[2][key] for part in parts) == pytest.approx(value, rel=1e-5, abs=1e-5)
    padded = {key: torch.cat([x, x.new_full((empty, T), 0 if key == "mask" else 3)]) for key, x in data.items()}
    got_loss, got_gradient, got_sums = step(name, mode, list(range(ROWS + empty)), padded)
    assert got_loss == loss
    assert torch.equal(got_gradient[:ROWS], gradient)
    assert not got_gradient[ROWS:].any()
    assert got_sums == sums
