"""The critic's loss (docs/methods.md#critic) against plain Python in float64, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms import value_loss


@pytest.mark.parametrize("clip_range", [0.2, 1.0, 0.0, None])
def test_value_loss_is_its_formula_in_value_gradient_and_count(clip_range: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 200, generator=generator, dtype=torch.float64)
    values = (old + 0.5 * torch.randn(200, generator=generator, dtype=torch.float64)).requires_grad_()
    loss, sums = value_loss(values, old, returns, clip_range)
    loss.sum().backward()
    want, gradient, cut = [], [], 0
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        near = o + min(max(v - o, -clip_range), clip_range) if clip_range else v
        plain, clipped = (v - r) ** 2, (near - r) ** 2
        want.append(0.5 * max(plain, clipped))
        is_cut = clipped > plain
        gradient.append(0.0 if is_cut else v - r)
        cut += is_cut
    torch.testing.assert_close(loss.detach(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(values.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    assert sums["clipped"].item() == cut
    assert (cut > 0) is bool(clip_range)


def test_at_the_old_values_clipping_changes_nothing() -> None:
    values = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    loss, _ = value_loss(values, values.detach(), torch.zeros(9), 0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss, values**2 / 2)
    torch.testing.assert_close(values.grad, values.detach())
