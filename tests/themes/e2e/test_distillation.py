"""Runs that are distilled from teachers: advantages and the loss are those of Hugging Face's models, run here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config import Config
from megarl.errors import ConfigError, DataError
from megarl.observe import read_metrics
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")
COEF, REWARD_COEF, K = 0.5, 2.0, 7


@pytest.fixture
def teachers(tiny_model: Path, tmp_path: Path) -> dict[str, Path]:
    """Two models with other weights than the policy's."""
    found = {}
    for seed, name in enumerate(("plain", "math"), 5):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tiny_model))
        with torch.no_grad():
            model.lm_head.weight.mul_(3)  # or all three would be close to uniform
        found[name] = tmp_path / name
        model.save_pretrained(found[name])
        transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(found[name])
    return found


def rows_file(folder: Path, named: str = "math") -> str:
    """Every third row names a teacher."""
    rows = [{"question": f"{n} + {n}", "answer": str(2 * n)} | ({"expert": named} if n % 3 == 0 else {}) for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def settings(folder: Path, teachers: dict[str, Path], **more: Any) -> dict[str, Any]:
    teacher = {"path": str(teachers["plain"]), "data_key": "expert"}
    teacher["named"] = [{"name": "math", "path": str(teachers["math"])}]  # type: ignore[assignment]
    train_rows = {"source": "jsonl", "path": rows_file(folder)}
    return {"data.train": train_rows, "data.eval": None, "teacher": teacher, "run.steps": 1} | more


def log_probs_of(folder: Path, sample: dict[str, Any]) -> torch.Tensor:
    """Hugging Face's log-probs of the whole vocabulary before each response token, float `[L, V]`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([sample["prompt_ids"] + sample["response_ids"]])
    with torch.no_grad():
        return model(ids).logits[0, len(sample["prompt_ids"]) - 1 : -1].double().log_softmax(-1)


def recorded(config: Config) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The samples and the metrics of the only step."""
    folder = Path(config.run_folder)
    (metrics,) = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()], metrics


def test_each_row_is_judged_by_its_own_teacher_and_by_its_reward(
    tiny_config: Callable[..., Config], tiny_model: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    distillation = {"coef": COEF, "reward_coef": REWARD_COEF, "gamma": 1.0}
    algorithm = {"name": "dr_grpo", "distillation": distillation}
    config = tiny_config(**settings(tmp_path, teachers, algorithm=algorithm), **{"policy.layout": {"dp": 2}})
    train(config)

    samples, metrics = recorded(config)
    named = [sample["row"].get("expert") for sample in samples]
    assert set(named) == {"math", None}  # or one of the teachers was not asked
    gaps = []
    for sample, name in zip(samples, named, strict=True):
        tokens = torch.tensor(sample["response_ids"])[:, None]
        student, teacher = (
            log_probs_of(folder, sample).gather(1, tokens)[:, 0] for folder in (tiny_model, teachers[name or "plain"])
        )
        gaps.append(student - teacher)
        group = [one["training"]["reward"] for one in samples if one["group_id"] == sample["group_id"]]
        of_reward = REWARD_COEF * (sample["training"]["reward"] - sum(group) / len(group))
        to_go = (student - teacher).flip(0).cumsum(0).flip(0)
        assert sample["training"]["advantages"] == pytest.approx((of_reward - COEF * to_go).tolist(), abs=1e-4)
    assert metrics["distillation/reverse_kl"] == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-4)
    assert "distillation/loss" not in metrics


def test_the_divergence_over_the_policys_likeliest_tokens_is_the_dense_one_and_trains_without_a_reward(
    tiny_config: Callable[..., Config], tiny_model: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    distillation = {"apply_to": "loss", "divergence": "jsd", "beta": 0.3, "top_k": K, "top_k_of": "policy"}
    algorithm = {"name": "opd", "distillation": distillation}
    config = tiny_config(**settings(tmp_path, teachers, algorithm=algorithm, rewards=[]), **{"policy.layout": {"tp": 2}})
    train(config)

    samples, metrics = recorded(config)
    divergences, tails = [], []
    for sample in samples:
        student, teacher = (
            log_probs_of(folder, sample).exp() for folder in (tiny_model, teachers[sample["row"].get("expert", "plain")])
        )
        ids = student.topk(K).indices
        p, q = (
            torch.cat([told, 1 - told.sum(1, keepdim=True)], dim=1) for told in (student.gather(1, ids), teacher.gather(1, ids))
        )
        mixture = 0.3 * q + 0.7 * p
        divergences.append(0.3 * (q * (q / mixture).log()).sum(1) + 0.7 * (p * (p / mixture).log()).sum(1))
        tails.append(torch.stack([p[:, -1], q[:, -1]]))
    own, of_teacher = torch.cat(tails, dim=1).mean(1).tolist()
    assert metrics["distillation/loss"] == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-4)
    assert metrics["distillation/policy_tail"] == pytest.approx(own, rel=1e-4)
    assert metrics["distillation/teacher_tail"] == pytest.approx(of_teacher, rel=1e-4)
    assert metrics["policy/loss"] == 0
    assert metrics["policy/grad_norm"] > 0


def test_rows_teachers_and_numbers_of_tokens_are_looked_at_before_anything_starts(
    tiny_config: Callable[..., Config], teachers: dict[str, Path], tmp_path: Path
) -> None:
    given = settings(tmp_path, teachers, **{"algorithm.name": "opd"})
    only_named = given | {"teacher": {key: value for key, value in given["teacher"].items() if key != "path"}}
    with pytest.raises(
        DataError, match=r"row 'train-1' names no teacher: give it the key expert \(teacher\.data_key\), or set"
    ):
        train(tiny_config(**only_named))
    rows_file(tmp_path, named="history")
    with pytest.raises(
        DataError, match=r"expert of row 'train-0' is 'history', which is none of teacher\.named; it must be one of"
    ):
        train(tiny_config(**given))
    rows_file(tmp_path)
    wide = {"algorithm.distillation": {"apply_to": "loss", "top_k": 500}}
    with pytest.raises(
        ConfigError, match=r"top_k is 500, which is more tokens than policy and teacher both have; it must be at"
    ):
        train(tiny_config(**given, **wide))
    tokenizer = json.loads((teachers["math"] / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["Q7"] = tokenizer["model"]["vocab"].pop("7")
    (teachers["math"] / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"teacher\.named\[0\]\.path is '.*', which has another vocabulary than model\.path"):
        train(tiny_config(**given))
