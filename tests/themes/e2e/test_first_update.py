"""Old log-probs that the first update of a step computes need no pass of their own, and change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config
from megarl.runs.training_side import POLICY
from megarl.trainers.rl.train import train
from megarl.workers.roles import Roles
from tests.themes.e2e.records import curve

pytestmark = pytest.mark.usefixtures("local_ray")


def run(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], bytes, list[dict[str, Any]], list[dict[str, Any]]]:
    """Tokens of each of the policy's passes without gradients, the trained weights, and what metrics and samples say."""
    passed: list[int] = []
    forward = Roles.forward

    def counted(self: Roles, role: Any, batch: Any, names: Any, *, rows: Any = None, **more: Any) -> None:
        if role == POLICY:
            passed.append(int(batch.mask[[*(range(len(batch)) if rows is None else rows)]].sum()))
        forward(self, role, batch, names, rows=rows, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Roles, "forward", counted)
        train(config)
    folder = Path(config.run_folder)
    weights = (folder / "model" / "model.safetensors").read_bytes()
    metrics = [row for row in curve(folder) if row["step"]]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return passed, weights, metrics, samples


@pytest.mark.parametrize(
    ("mini_batches", "epochs", "more"),
    [
        (2, 2, {}),
        pytest.param(1, 2, {"algorithm.advantage": "reinforce", "run.guards": []}, marks=pytest.mark.exhaustive),
        pytest.param(4, 1, {"policy.layout": {"dp": 2}}, marks=pytest.mark.exhaustive),
        pytest.param(2, 1, {"policy.layout": {"tp": 2}}, marks=pytest.mark.exhaustive),
        pytest.param(2, 2, {"algorithm.policy_loss": "gspo"}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_first_update_computes_the_old_log_probs_of_its_rows(
    mini_batches: int, epochs: int, more: dict[str, Any], tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the weights of a run whose passes are over all rows, by fewer tokens.

    Each group has a micro-batch of its own, so that a pass and an update compute with matrices of the same shapes.
    """
    settings = {
        "data.eval": None, "run.export": True, "algorithm.mini_batches": mini_batches, "algorithm.epochs": epochs,
        "policy.max_tokens_per_micro_batch": 102,
    }  # fmt: skip
    found = {}
    for name in ("apart", "first"):
        config = tiny_config(**settings, **more, **{"run.name": name})
        assert config.first_update_is_a_pass
        with monkeypatch.context() as patched:
            if name == "apart":
                patched.setattr(Config, "first_update_is_a_pass", False)
            found[name] = run(config, monkeypatch)
    all_tokens, apart, of_apart, samples_apart = found["apart"]
    later_tokens, first, of_first, samples_first = found["first"]
    of_step = [
        sum(sum(s["mask"]) if s.get("mask") else len(s["response_ids"]) for s in samples_first if s["step"] == step)
        for step in (1, 2)
    ]
    assert all_tokens == of_step
    if mini_batches == 1:
        assert later_tokens == []
    else:
        share = 1 - 1 / mini_batches
        assert sum(later_tokens) == pytest.approx(share * sum(all_tokens), rel=0.2)  # responses differ in length
        assert len(later_tokens) == len(of_step)
    assert first == apart
    assert [s["training"] for s in samples_first] == [s["training"] for s in samples_apart]
    assert len(of_first) == len(of_apart) == 2
    assert of_first == of_apart


@pytest.mark.exhaustive
def test_a_step_that_updates_the_critic_alone_has_its_pass(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first of two steps nothing else computes the policy's log-probs."""
    ppo = {"algorithm.name": "ppo", "algorithm.kl": {"coef": 0.0}, "algorithm.mini_batches": 1, "algorithm.epochs": 2}
    config = tiny_config(**ppo, **{"data.eval": None, "run.export": True, "critic.warmup_steps": 1})
    assert config.first_update_is_a_pass
    passed, _, metrics, samples = run(config, monkeypatch)
    assert passed == [sum(len(s["response_ids"]) for s in samples if s["step"] == 1)]
    assert ["policy/ratio" in row for row in metrics] == [False, True]
    for sample in samples:
        assert sample["training"]["log_probs"] == pytest.approx(sample["rollout_log_probs"], abs=1e-4)
