"""A step whose tokens never reach the driver has the numbers of one whose tokens the driver has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import megarl
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.stored import StoredSample
from megarl.data.stored_batch import StoredBatch

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

CONFIGS: dict[str, dict[str, Any]] = {
    "critic, KL in the reward, corrected": {
        "algorithm.advantage": "gae",
        "policy.layout": {"dp": 2},
        "algorithm.kl": {"coef": 0.05, "apply_to": "reward", "target": 0.1},
        "algorithm.rollout_correction": [{"mode": "tis_token", "low": 0.0, "high": 1.001, "normalise": True}],
        "algorithm.truncated_responses": "bootstrap",
    },
    "groups, chosen tokens": {
        "algorithm.advantage": "grpo",
        "policy.layout": {"dp": 2},
        "algorithm.policy_loss": "clip_cov",
        "algorithm.policy_loss_args": {"share": 0.2, "low": 1e-6, "high": 9.0},
        "algorithm.entropy": {"top_share": 0.5},
        "algorithm.positive_nll": {"coef": 0.1},
        "algorithm.epochs": 2,
        "algorithm.truncated_responses": "mask",
    },
    "whitened over the batch, of unlike pipelines": {
        "algorithm.advantage": "reinforce_plus_plus",
        "policy.layout": {"pp": 2},
        "algorithm.epochs": 2,
    },
}


def numbers(session: megarl.Session, batch: Batch, rewards: list[float]) -> dict[str, Any]:
    """The metrics of a step on `batch`, its columns and its mask."""
    state = session.state()
    figures: dict[str, Any] = {"advantages": session.advantages(batch, rewards)}
    roles = ("policy", "critic") if session.config.uses_critic else ("policy",)
    figures |= {role: session.forward_backward(batch, role=role) for role in roles}
    figures["columns"] = {name: batch.columns[name] for name in batch.columns}
    figures["mask"], figures["counts"] = batch.mask, batch.counts
    session.experience.load_state_dict(state["experience"])
    return figures


@pytest.mark.parametrize("more", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokens_in_a_store_give_the_same_numbers(more: dict[str, Any], tiny_config: Callable[..., Config]) -> None:
    with megarl.open(tiny_config(**more)) as session:
        session.sync_weights()
        samples = [sample for group in session.sample(session.prompts(4), 4) for sample in group]
        assert all(isinstance(sample, StoredSample) for sample in samples)
        rewards = [float(number % 3) for number in range(len(samples))]
        there, here = session.batch(samples), session.batch([sample.loaded() for sample in samples])
        assert isinstance(there, StoredBatch)
        assert type(here) is Batch
        stored, plain = (numbers(session, batch, rewards) for batch in (there, here))
    assert not there.columns.here, "the driver has these columns"
    assert stored["columns"].keys() == plain["columns"].keys()
    for name, column in plain["columns"].items():
        torch.testing.assert_close(
            stored["columns"][name], column, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert torch.equal(stored["mask"], plain["mask"])
    assert torch.equal(stored["counts"], plain["counts"])
    assert stored["advantages"] == plain["advantages"]
    for role in ("policy", "critic") if "critic" in plain else ("policy",):
        assert stored[role] == pytest.approx(plain[role], rel=1e-6, abs=1e-9)
