"""The learning rate of every update follows from its number and the config in force, also behind a checkpoint of another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.megatron.optimizer import continue_schedule, place_in_schedule, schedule_of
from megarl.megatron.options import OptimizerOptions
from tests.families import build_folder
from tests.megatron.routing_reference import policy_loss
from tests.megatron.saving import load_role, save_role
from tests.themes.parallel.worlds import MODES, micro_batches, units
from tests.world import World

LR = 1e-2


def rates(options: OptimizerOptions) -> list[float]:
    """The learning rate of each update of a run."""
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    scheduler = schedule_of(optimizer, options)
    found = []
    for _ in range(options.total_steps):
        scheduler.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def published(schedule: str, warmup: int, total: int) -> list[float]:
    """transformers' schedule, of its step after the one at a rate of 0 where there is a warm-up."""
    make = {
        "linear": transformers.get_linear_schedule_with_warmup,
        "cosine": transformers.get_cosine_schedule_with_warmup,
    }[schedule]
    shift = 1 if warmup else 0
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = make(optimizer, warmup, total + shift)
    found = []
    for _ in range(total + shift):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found[shift:]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 8), (1, 2), (3, 8), (8, 8)])
def test_schedules_are_transformers_and_their_last_update_has_a_rate(schedule: str, warmup: int, total: int) -> None:
    found = rates(OptimizerOptions(lr=LR, schedule=schedule, warmup_steps=warmup, total_steps=total))
    assert found == pytest.approx(published(schedule, warmup, total))
    assert found[max(warmup, 1) - 1] == LR
    assert min(found) > 0


def test_a_decay_ends_at_min_lr_one_update_behind_the_last() -> None:
    found = rates(OptimizerOptions(lr=1.0, min_lr=0.2, schedule="linear", total_steps=4))
    assert found == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert rates(OptimizerOptions(lr=1.0, warmup_steps=2, total_steps=4)) == [0.5, 1.0, 1.0, 1.0]


def test_another_number_of_updates_in_a_step_leaves_the_step_where_it_is() -> None:
    of_two = OptimizerOptions(lr=LR, schedule="cosine", total_steps=16, updates_per_step=2)  # 8 steps
    scheduler = schedule_of(SimpleNamespace(param_groups=[{}]), of_two)
    scheduler.step(6)  # 3 steps
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    of_one = schedule_of(optimizer, replace(of_two, total_steps=8, updates_per_step=1))
    continue_schedule(of_one, place_in_schedule(scheduler, 2), 1)
    of_one.step(1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(published("cosine", 0, 8)[3])


def test_a_schedule_that_goes_back_is_where_the_checkpoint_was() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    scheduler = schedule_of(optimizer, OptimizerOptions(lr=LR, schedule="linear", total_steps=8))
    scheduler.step(2)
    saved = place_in_schedule(scheduler, 1)
    scheduler.step(3)
    continue_schedule(scheduler, saved, 1)
    scheduler.step(1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(published("linear", 0, 8)[2])


BEFORE: dict[str, Any] = {"schedule": "cosine", "total_steps": 3}
CHANGES: dict[str, dict[str, Any]] = {
    "longer": {"schedule": "cosine", "total_steps": 6},
    "linear": {"schedule": "linear", "total_steps": 6},
    "warm-up": {"schedule": "linear", "total_steps": 6, "warmup_steps": 5},
    "rate": {"schedule": "cosine", "total_steps": 6, "lr": LR / 4, "min_lr": LR / 8, "weight_decay": 0.2},
    "constant": {"schedule": "constant", "total_steps": 6, "lr": LR / 3},
}
UPDATES = 3


def changed(rank: int, world_size: int, folder: Path, saved: str) -> dict[str, Any]:
    """By change what the update behind the checkpoint says of its rate, what groups had, and the largest step of a weight."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.global_names import global_tensors
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel
    from tests.megatron.moments import adams

    initialize_layout(Layout(), seed=1)

    def role_of(**more: Any) -> Any:
        return RankModel(ModelOptions(str(folder), Layout()), OptimizerOptions(**{"lr": LR, "eps": 1e-8, **more}))

    def update(role: Any) -> dict[str, Any]:
        before = [tensor.detach().clone() for _, tensor in global_tensors(role.chunks)]
        shown = role.update(micro_batches(MODES["packed"], 1, units())[0], policy_loss)["lr"]
        moved = max(float((a - b).abs().max()) for a, (_, b) in zip(before, global_tensors(role.chunks), strict=True))
        groups = [group for part in adams(role) for group in part.optimizer.param_groups]
        return {
            "shown": shown,
            "used": {group["lr"] for group in groups},
            "decay": max(group["weight_decay"] for group in groups),
            "moved": moved,
        }

    role = role_of(**BEFORE)
    for _ in range(UPDATES):
        update(role)
    save_role(role, saved)
    found = {}
    for name, options in CHANGES.items():
        resumed = role_of(**options)
        load_role(resumed, saved)
        found[name] = update(resumed)
    return found


def test_what_a_resumed_run_does_is_the_schedule_of_its_config(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    [found] = world.call(changed, tmp_path / "model", str(tmp_path / "saved"), size=1)
    number = UPDATES  # of the update behind the checkpoint, counted from 0
    cosine = published("cosine", 0, 6)[number]
    expected = {
        "longer": cosine,
        "linear": published("linear", 0, 6)[number],
        "warm-up": LR * (number + 1) / 5,
        "rate": LR / 8 + (cosine / LR) * (LR / 4 - LR / 8),
        "constant": LR / 3,
    }
    for name, rate in expected.items():
        assert found[name]["shown"] == pytest.approx(rate), name
        assert found[name]["used"] == {found[name]["shown"]}, name
        # Adam moves a weight whose gradients agree by about its rate; a decayed one by a little more
        assert rate / 2 < found[name]["moved"] < 3 * rate, name
    assert (found["longer"]["decay"], found["rate"]["decay"]) == (0.0, 0.2)
