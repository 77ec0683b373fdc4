"""Online DPO on the driver and in a stream: which responses make a pair, and the loss and gradient of the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import token_weights
from megarl.algorithms.preference import PreferenceSettings
from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.experience.experience import mini_batch_rows
from megarl.experience.objectives import PolicyObjective
from megarl.options.online_pairs.loss import PairLoss
from megarl.options.online_pairs.run import choose_pairs

LENGTHS = (3, 2, 4, 1, 3, 2, 2, 4)
GROUPS = "aabababc"
"""Groups in no order; c has one response."""


def sample(row: int, prompt: int = 5) -> Sample:
    size = LENGTHS[row]
    mask = [int(place != 1 or size < 3) for place in range(size)]  # a tool's token in the longer ones
    return Sample(
        sample_id=str(row), group_id=GROUPS[row], row_id=GROUPS[row], prompt_ids=[prompt, 6], response_ids=[*range(size)],
        sampled_mask=mask, rollout_log_probs=[-1.0] * size, weight_versions=[0] * size, finish_reason="stop",
    )  # fmt: skip


def given(advantages: list[float], **prompts: int) -> Batch:
    batch = Batch([sample(row, prompts.get(f"row{row}", 5)) for row in range(len(GROUPS))])
    batch.columns["advantages"] = torch.tensor(advantages)[:, None] * batch.mask
    return batch


@pytest.mark.parametrize(
    ("advantages", "rows", "untied"),
    [
        ([0.5, -1.0, 0.1, 2.0, 0.3, 0.2, 0.0, 9.0], (3, 1, 4, 6), {3, 1, 4, 6}),
        ([0.0, 0.0, 0.1, 0.0, 0.3, 0.0, -0.1, 9.0], (0, 1, 4, 6), {4, 6}),  # a is tied
        ([1.0, 1.0, 0.3, -1.0, 0.3, -1.0, 0.3, 9.0], (0, 3, 2, 4), {0, 3}),  # first of equal ones
    ],
)
def test_the_best_of_a_group_stands_against_the_worst_and_ties_teach_nothing(
    advantages: list[float], rows: tuple[int, ...], untied: set[int]
) -> None:
    batch = given(advantages)
    pairs = choose_pairs(batch)
    assert pairs.rows == rows
    assert pairs.counted == untied
    assert pairs.figures == {"pairs/used": len(untied) / 2, "pairs/tied": 2 - len(untied) / 2}
    assert [row for row in rows if batch.columns["is_chosen"][row, 0]] == list(rows[::2])
    assert batch.columns["pair"][list(rows), 0].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_a_response_without_tokens_or_to_another_prompt_is_in_no_pair() -> None:
    batch = given([0.5, -1.0, 0.1, 2.0, 0.3, 0.2, 0.0, 9.0], row4=7)
    batch.mask[3] = False
    assert choose_pairs(batch).rows == (0, 1, 2, 6)


def test_sides_of_a_pair_are_in_one_mini_batch() -> None:
    batch = given([0.5, -1.0, 0.1, 2.0, 0.3, 0.2, 0.0, 9.0])
    pairs = choose_pairs(batch)
    parts = mini_batch_rows(batch, 2, 3, pairs.rows)
    assert sorted(map(sorted, parts)) == [[1, 3], [4, 6]]
    assert sorted(mini_batch_rows(batch, 1, 3, pairs.rows)[0]) == [1, 3, 4, 6]


def stream_of(rows: list[int], batch: Batch, columns: dict[str, Tensor]) -> Any:
    """The scored tokens of `rows`, as a stream has them."""
    mask = batch.mask[rows]
    lengths = mask.sum(1)
    return SimpleNamespace(
        lengths=lengths,
        owners=rows,
        response=torch.arange(len(rows)).repeat_interleave(lengths),
        columns={name: column[rows][mask] for name, column in columns.items()},
    )


@pytest.mark.parametrize("name", ["dpo", "ipo"])
@pytest.mark.parametrize("ties", [False, True])
def test_loss_and_gradient_are_those_of_the_untied_pairs_in_any_micro_batches(name: str, *, ties: bool) -> None:
    """−log σ(β·(h_w − h_l)), or IPO's square, with the RPO term; a mean over pairs, in float64."""
    advantages = [0.5, -1.0, 0.1, 2.0, 0.3, 0.2, 0.0, 9.0]
    batch = given([0.0 if ties and GROUPS[row] == "b" else value for row, value in enumerate(advantages)])
    pairs, beta, alpha = choose_pairs(batch), 0.7, 0.3
    kept = torch.zeros_like(batch.mask)
    untied = sorted(pairs.counted)
    kept[untied] = batch.mask[untied]
    generator = torch.Generator().manual_seed(1)
    new, reference = -torch.rand(2, *batch.mask.shape, generator=generator, dtype=torch.float64) * 3
    columns = {name: column.double() for name, column in batch.columns.items()}
    columns |= {"weights": token_weights(kept, "seq_mean_token_sum").double(), "reference_log_probs": reference}
    objective = PolicyObjective(name, of_stream=PairLoss(name, PreferenceSettings(beta=beta, rpo_alpha=alpha)))
    leaf = new.clone().requires_grad_()
    total, figures = torch.zeros((), dtype=torch.float64), {"accuracy": 0.0, "margin": 0.0, "loss": 0.0}
    couples = [list(pairs.rows[place : place + 2]) for place in range(0, len(pairs.rows), 2)]
    for rows in ([couple[::-1] for couple in couples], [[*pairs.rows]])[ties]:
        stream = stream_of(rows, batch, columns)
        output = torch.stack([leaf[rows][batch.mask[rows]], torch.zeros(len(stream.response))], dim=-1)
        loss, metrics = objective(output, stream)
        total = total + loss
        figures["accuracy"] += float(metrics["policy/pair_accuracy"])
        figures["margin"] += float(metrics["policy/pair_margin"])
        figures["loss"] += float(metrics["policy/loss"])
    own = new.clone().requires_grad_()
    h = ((own - reference) * batch.mask).sum(1)
    want, margins = [], []
    for w, r in couples:
        if w in pairs.counted:
            margins.append(float(beta * (h[w] - h[r])))
            pair = -torch.sigmoid(beta * (h[w] - h[r])).log() if name == "dpo" else (h[w] - h[r] - 1 / (2 * beta)) ** 2
            want.append(pair - alpha * (own * batch.mask).sum(1)[w] / batch.mask.sum(1)[w])
    mean = torch.stack(want).mean()
    torch.testing.assert_close(total, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, leaf)[0], torch.autograd.grad(mean, own)[0], rtol=1e-12, atol=1e-14)
    assert figures["loss"] == pytest.approx(float(mean), rel=1e-12)
    assert figures["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-6)
    assert figures["accuracy"] == sum(margin > 0 for margin in margins) / len(margins)


def test_a_pair_that_the_policy_does_not_tell_apart_counts_half() -> None:
    batch = given([0.5, -1.0, 0.1, 2.0, 0.3, 0.2, 0.0, 9.0])
    pairs = choose_pairs(batch)
    same = -torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    kept = torch.zeros_like(batch.mask)
    kept[[*pairs.rows]] = batch.mask[[*pairs.rows]]
    columns = {**batch.columns, "weights": token_weights(kept, "seq_mean_token_sum"), "reference_log_probs": same}
    stream = stream_of([*pairs.rows], batch, columns)
    _, metrics = PairLoss("dpo", PreferenceSettings())(same[[*pairs.rows]][batch.mask[[*pairs.rows]]], stream)
    assert float(metrics["pair_accuracy"]) == pytest.approx(0.5)
