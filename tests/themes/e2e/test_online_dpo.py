"""Online DPO: two updates on pairs that the policy sampled are those of Hugging Face on the same responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")
BETA, LR, EPS = 0.5, 1e-2, 1e-3


def log_prob(model: Any, sample: dict[str, Any]) -> Tensor:
    """Of a whole response, float64; every token is sampled."""
    prompt, response = sample["prompt_ids"], sample["response_ids"]
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum()


def expected(path: Path, groups: list[list[dict[str, Any]]]) -> tuple[list[float], int]:
    """The loss before each of two updates, and the number of pairs."""
    model, frozen = (transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    model.model.embed_tokens.padding_idx = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    pairs = []
    for group in groups:
        rewards = [sample["training"]["reward"] for sample in group]
        if max(rewards) > min(rewards):
            pairs.append((group[rewards.index(max(rewards))], group[rewards.index(min(rewards))]))
    losses = []
    for _ in range(2):
        margins = []
        for chosen, rejected in pairs:
            with torch.no_grad():
                of_reference = log_prob(frozen, chosen) - log_prob(frozen, rejected)
            margins.append(log_prob(model, chosen) - log_prob(model, rejected) - of_reference)
        loss = -logsigmoid(BETA * torch.stack(margins)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, len(pairs)


@pytest.mark.parametrize(
    "layout", [pytest.param({"dp": 2}, id="dp2"), pytest.param({"tp": 2}, id="tp2", marks=pytest.mark.exhaustive)]
)
def test_two_updates_on_sampled_pairs_are_hugging_faces(
    layout: dict[str, int], tiny_config: Callable[..., Config], tiny_model: Path
) -> None:
    algorithm = {"name": "online_dpo", "epochs": 2, "policy_loss_args": {"beta": BETA}}
    settings: dict[str, Any] = {"algorithm": algorithm, "policy.layout": layout, "data.eval": None, "run.steps": 1}
    config = tiny_config(**settings, **{"policy.optimizer": {"lr": LR, "eps": EPS}})
    train(config)
    folder = Path(config.run_folder)
    (metrics,) = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        groups.setdefault(sample["group_id"], []).append(sample)
    losses, pairs = expected(tiny_model, [*groups.values()])
    assert metrics["pairs/used"] == pairs > 0
    assert metrics["pairs/used"] + metrics["pairs/tied"] == len(groups)
    assert losses[0] - losses[1] > 0.05  # something was learned, so there is something to compare
    assert metrics["policy/loss"] == pytest.approx(sum(losses) / 2, rel=2e-4)
    assert metrics["policy/pair_accuracy"] > 0
