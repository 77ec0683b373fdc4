"""Training on given responses to pictures: losses and gradient norms of three updates are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from megarl.config.load import parse_supervised_config
from megarl.observe import read_metrics
from megarl.trainers.supervised.train import train
from tools.model import tiny_vision

pytestmark = pytest.mark.usefixtures("local_ray")
STEPS, LR, EPS, BETA = 3, 1e-2, 1e-3, 0.3
ROWS = 4
SOURCE = """
import sys
sys.path.insert(0, {root!r})
from tests.themes.e2e.test_vision_objectives import rows
"""
"""A file of rows for the driver, which does not have the tests on its path."""


def rows() -> list[dict[str, Any]]:
    """Pictures of shapes, each with a right answer that is longer than the wrong one, and with a label."""
    found = tiny_vision.examples(0, ROWS)
    for number, row in enumerate(found):
        answer = int(row.pop("answer"))
        row |= {
            "chosen": f"{answer} {number}",
            "rejected": str(answer % 5 + 1),
            "response": str(answer),
            "label": number % 2 == 0,
        }
    return found


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-vision"
    tiny_vision.make(folder)
    return folder


class Reference:
    """The model in transformers with AdamW, the rows, and what the formulas need of them."""

    def __init__(self, folder: Path, *, scores: bool) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model, self.frozen = (
            Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32) for _ in range(2)
        )
        self.model.model.language_model.embed_tokens.padding_idx = None
        self.head = torch.zeros(1, 128, requires_grad=scores)
        self.parameters = [*(self.model.model.parameters() if scores else self.model.parameters()), self.head]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
        self.rows = rows()

    def given(self, row: dict[str, Any], answer: str) -> tuple[dict[str, Tensor], list[int]]:
        """What transformers takes of a prompt and an answer with its end, and the answer's ids."""
        given, _ = tiny_vision.inputs(self.tokenizer, [row | {"answer": "1"}])
        said = [*self.tokenizer.encode(answer), tiny_vision.EOS]
        ids = torch.cat([given["input_ids"][:, :-1], torch.tensor([said])], dim=1)
        return given | {"input_ids": ids, "mm_token_type_ids": (ids == tiny_vision.IMAGE).int()}, said

    def log_prob(self, row: dict[str, Any], answer: str, model: Any) -> Tensor:
        given, said = self.given(row, answer)
        logits = model(**given).logits[0, -len(said) - 1 : -1].double()
        return logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None]).sum()

    def ratio(self, row: dict[str, Any], answer: str) -> Tensor:
        with torch.no_grad():
            reference = self.log_prob(row, answer, self.frozen)
        return self.log_prob(row, answer, self.model) - reference

    def score(self, row: dict[str, Any], answer: str) -> Tensor:
        return (self.model.model(**self.given(row, answer)[0]).last_hidden_state[0, -1] @ self.head[0]).double()

    def updates(self, loss: Callable[[Reference], Tensor]) -> list[tuple[float, float]]:
        """`loss` before each update, and the norm of its gradient."""
        found = []
        for _ in range(STEPS):
            value = loss(self)
            self.optimizer.zero_grad()
            value.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            found.append((float(value.detach()), float(norm)))
        return found


def dpo(r: Reference) -> Tensor:
    margins = [r.ratio(row, row["chosen"]) - r.ratio(row, row["rejected"]) for row in r.rows]
    return -logsigmoid(BETA * torch.stack(margins)).mean()


def kto(r: Reference) -> Tensor:
    """Each response's mismatched one is the next row's."""
    with torch.no_grad():
        kls = [r.ratio(row, r.rows[(number + 1) % ROWS]["response"]) for number, row in enumerate(r.rows)]
    z = torch.stack(kls).mean().clamp(min=0)
    signs = [1 if row["label"] else -1 for row in r.rows]
    terms = [sign * BETA * (r.ratio(row, row["response"]) - z) for sign, row in zip(signs, r.rows, strict=True)]
    return torch.stack([1 - term.sigmoid() for term in terms]).mean()


def reward_model(r: Reference) -> Tensor:
    return -logsigmoid(torch.stack([r.score(row, row["chosen"]) - r.score(row, row["rejected"]) for row in r.rows])).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "layout", "loss"),
    [
        ({"name": "dpo", "beta": BETA}, {"tp": 2}, dpo),
        ({"name": "kto", "beta": BETA}, {"dp": 2}, kto),
        ({"name": "reward_model"}, {"pp": 2}, reward_model),
    ],
    ids=["dpo", "kto", "reward model"],
)
def test_losses_and_gradient_norms_are_those_of_transformers(
    objective: dict[str, Any],
    layout: dict[str, int],
    loss: Callable[[Reference], Tensor],
    seeing_model: Path,
    tmp_path: Path,
) -> None:
    source = tmp_path / "source.py"
    source.write_text(SOURCE.format(root=str(Path(__file__).parents[3])))
    config = parse_supervised_config(
        {
            "run": {"folder": str(tmp_path / "runs"), "steps": STEPS},
            "model": {"path": str(seeing_model), "dtype": "float32"},
            "policy": {
                "layout": layout, "threads_per_rank": 1, "optimizer": {"lr": LR, "eps": EPS}, "max_tokens_per_micro_batch": 64
            },
            "objective": objective,
            "data": {
                "train": {"source": "python", "name": f"{source}:rows"}, "rows_per_step": ROWS, "max_tokens": 32,
                "prompt_key": "problem", "chat_template": "never",
            },
        }
    )  # fmt: skip
    train(config)
    metrics = [row for row in read_metrics(Path(config.run_folder) / "metrics.jsonl") if "train/loss" in row]
    expected = Reference(seeing_model, scores=config.has_value_head).updates(loss)
    assert expected[0][0] != pytest.approx(expected[2][0], rel=1e-3)  # something was learned: there is something to compare
    assert [row["train/loss"] for row in metrics] == pytest.approx([value for value, _ in expected], rel=2e-4, abs=2e-5)
    assert [row["train/grad_norm"] for row in metrics] == pytest.approx([norm for _, norm in expected], rel=1e-3)
