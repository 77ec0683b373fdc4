"""Models of clients on a session's ranks, through Ray: side by side as alone, saved, loaded, exported, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megarl
from megarl.config import Config
from megarl.options.serve.trainer import SessionTrainer
from megarl.options.serve.values import AdamParams, AdapterChoice, Datum, Loss, RequestError

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def data(seed: int) -> list[Datum]:
    """Three sampled sequences; the last has a token alone."""
    draw, found = np.random.default_rng(seed), []
    for length in (7, 12, 1):
        tokens = draw.integers(0, 12, length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:].astype(np.int64)}
        inputs |= {"logprobs": draw.uniform(-4, -1, length).astype(np.float32)}
        inputs |= {"advantages": draw.normal(size=length).astype(np.float32)}
        found.append(Datum(tokens[:-1].astype(np.int32), inputs))
    return found


def step(trainer: SessionTrainer, model: str, seed: int) -> list[Any]:
    """The log-probs of a pass and the norm of its gradients, which are applied."""
    passed = trainer.run_pass(model, data(seed), Loss("ppo"), backward=True)
    return [*(output["logprobs"] for output in passed.outputs), trainer.optimizer_step(model, AdamParams(0.01))["grad_norm"]]


@pytest.mark.parametrize("layout", [{"dp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.exhaustive)], ids=["dp2", "tp2"])
def test_models_on_a_sessions_ranks(layout: dict[str, int], tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny_config(**{"policy.layout": layout, "policy.lora": {"rank": 4, "sync": "merged"}})
    with megarl.open(config) as session:
        trainer = SessionTrainer(session, tmp_path / "moved", live=1)
        choices = {"a": AdapterChoice(4, seed=1), "b": AdapterChoice(2, seed=2, train_attn=False), "c": AdapterChoice(3)}
        for name, choice in choices.items():
            trainer.create(name, choice)
        together = {name: list[Any]() for name in choices}
        for number in range(3):
            for name in choices:
                together[name] += step(trainer, name, number)
        for name, choice in choices.items():
            trainer.create("alone", choice)
            alone = [found for number in range(3) for found in step(trainer, "alone", number)]
            assert all(map(np.array_equal, together[name], alone))
            trainer.drop("alone")
        assert len({together[name][-1] for name in choices}) == 3

        seen = trainer.run_pass("a", data(9), Loss("ppo"), backward=False)
        trainer.save("a", tmp_path / "state")
        trainer.export("a", tmp_path / "adapter")
        assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
        after = step(trainer, "a", 4)
        trainer.load("a", tmp_path / "state", with_optimizer=True)
        again = trainer.run_pass("a", data(9), Loss("ppo"), backward=False)
        assert all(
            np.array_equal(one["logprobs"], two["logprobs"]) for one, two in zip(seen.outputs, again.outputs, strict=True)
        )
        assert seen.metrics == again.metrics
        assert all(map(np.array_equal, step(trainer, "a", 4), after))
        with pytest.raises(RequestError, match="no whole state"):
            trainer.load("a", tmp_path / "adapter", with_optimizer=True)
        with pytest.raises(RequestError, match="both must be alike"):
            trainer.load("c", tmp_path / "state", with_optimizer=False)
