"""An update that is not finite, or that breaks a rule, leaves no trace: not in weights, moments, nor the schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.guard_rules import GuardRule
from megarl.config.layout import Layout
from tests.families import build_folder
from tests.megatron.moments import assert_equal, everything, merged, role_in, update
from tests.themes.parallel.worlds import MODES, micro_batches, objective
from tests.world import World


def nan_loss(output: torch.Tensor, stream: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Not a number, though its gradients are."""
    loss, metrics = objective(output, stream)
    return loss + math.nan, metrics


def nan_gradient(output: torch.Tensor, stream: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Finite, but its gradient is 0 times infinity."""
    loss, metrics = objective(output, stream)
    return loss + (0 * output).sqrt().sum(), metrics


def overflowing(output: torch.Tensor, stream: Any) -> tuple[torch.Tensor, dict[str, float]]:
    loss, metrics = objective(output, stream)
    return loss * 1e38, metrics


def poisoned_reward(output: torch.Tensor, stream: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Finite in every way, and absurd."""
    loss, metrics = objective(output, stream)
    return 1e6 * loss, metrics | {"kl/reference": 3.0 * len(output), "mismatch/log_prob_max": 9.0, "tokens": float(len(output))}


BROKEN = (nan_loss, nan_gradient, overflowing)
RULES = tuple(
    GuardRule("skip", metric, "above", bound)
    for metric, bound in (("grad_norm", 1000), ("kl/reference", 2.9), ("mismatch/log_prob_max", 8.9))
)


def train(rank: int, world_size: int, layout: Layout, folder: Path, disturbed: bool) -> dict[str, Any]:
    """Three good updates, with others between them that must not count; what rank 0 says of every one of those."""
    role = role_in(layout, folder)
    mine = micro_batches(MODES["packed"], layout.dp)[layout.coords(rank).dp]
    said: dict[str, dict[str, float]] = {}
    for good in range(3):
        if disturbed and good != 1:  # before the first update there are no moments yet
            for broken in BROKEN:
                # one replica alone has the broken loss; all must agree to skip
                said[f"{broken.__name__} {good}"] = role.update(mine, broken if layout.coords(rank).dp == 0 else objective)
        if disturbed and good:
            for rule in RULES:
                role.skip_rules = (rule,)
                said[f"{rule} {good}"] = role.update(mine, poisoned_reward)
            role.skip_rules = (
                GuardRule("skip", "kl/reference", "above", 3.1),
                GuardRule("skip", "kl/unknown", "above", 0),
            )
        update(role, rank)
    return {"tensors": everything(role), "said": said, "lr": role.optimizer.param_groups[0]["lr"]}


@pytest.mark.parametrize(("family", "layout"), [("llama", Layout(pp=2)), ("mixtral", Layout(dp=2, ep=2))])
def test_skipped_updates_leave_weights_moments_and_schedule_bit_for_bit(
    world: World, tmp_path: Path, family: str, layout: Layout
) -> None:
    build_folder(family, tmp_path / "model")
    undisturbed = world.call(train, layout, tmp_path / "model", False, size=2)
    disturbed = world.call(train, layout, tmp_path / "model", True, size=2)
    assert_equal(merged(disturbed, "tensors"), merged(undisturbed, "tensors"))
    assert disturbed[0]["lr"] == undisturbed[0]["lr"]
    said = disturbed[0]["said"]
    assert len(said) == 2 * len(BROKEN) + 2 * len(RULES)
    for what, metrics in said.items():
        is_rule = what.startswith("skip")
        assert (metrics["skipped"], metrics["non_finite"]) == (1.0, 0.0 if is_rule else 1.0), what
