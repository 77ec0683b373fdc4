"""Each loss and its derivative, element by element, against its documented formula in float64 by Python's own numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megarl.data.stream import Response, Unit, pack
from megarl.options.serve.losses import FILLS, FORMS, LOSS, Given, ServedLoss, token_losses
from megarl.runs.update_metrics import LOG_PROBS

PARAMETERS = {name: dict(form.parameters) for name, form in FORMS.items()} | {"dro": {"beta": 0.3}}


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


def clipped(ratio: float, advantage: float, low: float, high: float, slope: float) -> tuple[float, float]:
    """−min(r A, clip(r) A) and its derivative, where that of r is `slope`."""
    free, bound = ratio * advantage, clip(ratio, low, high) * advantage
    return (-free, -slope * advantage) if free <= bound else (-bound, 0.0)


def by_hand(name: str, tokens: list[dict[str, float]], parameters: dict[str, float]) -> list[tuple[float, float]]:
    """The loss of every token of one datum, and its derivative by the token's log p."""
    found = []
    if name == "gspo":
        masked = [token for token in tokens if token["sequence_ratio_mask"]]
        mean = sum(t["log_p"] - t["logprobs"] for t in masked) / len(masked) if masked else 0.0
    for token in tokens:
        log_p, low, high = (
            token["log_p"],
            *(token.get(one, parameters.get(one, math.nan)) for one in ("clip_low_threshold", "clip_high_threshold")),
        )
        if name == "cross_entropy":
            found.append((-token["weights"] * log_p, -token["weights"]))
            continue
        advantage, log_q = token["advantages"], token["logprobs"]
        ratio = math.exp(log_p - log_q)
        if name == "importance_sampling":
            found.append((-ratio * advantage, -ratio * advantage))
        elif name == "ppo":
            found.append(clipped(ratio, advantage, low, high, ratio))
        elif name == "cispo":
            found.append((-clip(ratio, low, high) * log_p * advantage, -clip(ratio, low, high) * advantage))
        elif name == "dro":
            beta, apart = parameters["beta"], log_p - log_q
            found.append((-(log_p * advantage - 0.5 * beta * apart**2), -(advantage - beta * apart)))
        else:
            ratio = math.exp(mean)
            found.append(clipped(ratio, advantage, low, high, ratio))
    return found


def data(name: str, *, thresholds: bool) -> list[list[dict[str, float]]]:
    """Three data of 5, 1 and 9 tokens; log-ratios are on both sides of the thresholds, and some advantages are 0."""
    draw = torch.Generator().manual_seed(len(name))
    made = []
    for length in (5, 1, 9):
        rows = []
        for place in range(length):
            log_p, apart, advantage, low = torch.rand(4, generator=draw, dtype=torch.float64).tolist()
            token = {
                "log_p": -3 * log_p,
                "logprobs": -3 * log_p - 0.8 * (apart - 0.5) - 0.08 * (length - 5),
                "weights": advantage - 0.3,
            }
            token |= {"advantages": 0.0 if place == 3 else 2 * advantage - 1, "sequence_ratio_mask": float(place > 0)}
            if thresholds:
                token |= {"clip_low_threshold": 0.8 + 0.2 * low, "clip_high_threshold": 1.0 + 0.2 * low}
            rows.append(token)
        made.append(rows)
    return made


def read(name: str, *, thresholds: bool) -> list[str]:
    form = FORMS[name]
    return [*form.required, *(form.optional if thresholds else ())]


@pytest.mark.parametrize("thresholds", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_losses_and_derivatives_are_the_formulas(name: str, thresholds: bool) -> None:
    tokens = data(name, thresholds=thresholds)
    whole = [token for rows in tokens for token in rows]
    log_probs = torch.tensor([token["log_p"] for token in whole], dtype=torch.float64, requires_grad=True)
    columns = {
        column: torch.tensor([token[column] for token in whole], dtype=torch.float64)
        for column in read(name, thresholds=thresholds)
    }
    response = torch.tensor([number for number, rows in enumerate(tokens) for _ in rows])
    losses = token_losses(name, log_probs, Given(columns, PARAMETERS[name], response, len(tokens)))
    losses.sum().backward()
    expected = [pair for rows in tokens for pair in by_hand(name, rows, PARAMETERS[name])]
    assert losses.tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-12)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-12, abs=1e-14)
    if name in ("ppo", "gspo"):
        cut = sum(slope == 0 and token["advantages"] != 0 for (_, slope), token in zip(expected, whole, strict=True))
        assert 0 < cut < len(whole)


def test_cross_entropy_takes_several_targets_per_position() -> None:
    weights = torch.rand(4, 3, dtype=torch.float64)
    log_probs = -torch.rand(4, 3, dtype=torch.float64)
    given = Given({"weights": weights}, {}, torch.zeros(4, dtype=torch.long), 1)
    assert torch.equal(token_losses("cross_entropy", log_probs, given), -weights * log_probs)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_tokens_without_an_advantage_count_0_however_far_the_sampler_is(name: str) -> None:
    log_probs = torch.zeros(2, requires_grad=True)
    columns = {"logprobs": torch.tensor([-500.0, 0.0]), "advantages": torch.tensor([0.0, 1.0])}
    columns["sequence_ratio_mask"] = torch.tensor([1.0, 0.0])
    given = Given(columns, PARAMETERS[name], torch.tensor([0, 1]), 2)
    losses = token_losses(name, log_probs, given)
    losses.sum().backward()
    assert losses[0] == 0
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("targets", [0, 1, 2])
def test_ranks_take_the_columns_that_were_asked_for_and_show_the_clients_rows(targets: int) -> None:
    def response(row: int, length: int) -> Response:
        weights = torch.full((length, targets) if targets > 1 else (length,), 0.5)
        columns = {"weights": weights, FILLS: torch.full((length,), float(row == 2))}
        return Response(row, torch.ones(length, dtype=torch.long), torch.ones(length, dtype=torch.bool), columns)

    stream = pack([Unit(torch.ones(1, dtype=torch.long), [response(row, length)]) for row, length in enumerate((3, 2, 1))])
    output = -torch.arange(6 * (2 + targets), dtype=torch.float32).view(6, -1)
    loss, metrics = ServedLoss("cross_entropy", {}, rows=2, targets=targets)(output, stream)
    scored = output[:5, 2:] if targets else output[:5, 0]
    assert float(loss) == -0.5 * float(scored.sum())
    assert float(metrics[LOSS]) == float(loss)
    shown: Any = metrics[LOG_PROBS]
    assert shown.before == 2
    assert torch.equal(shown.values[:5], scored[:, 0] if targets == 1 else scored)
