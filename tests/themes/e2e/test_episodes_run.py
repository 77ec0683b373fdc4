"""A run whose responses are conversations: the trainer's log-probs are the engine's at every token that was sampled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.config import Config
from megarl.data.sample import Prompt
from megarl.errors import ConfigError
from megarl.observe import read_metrics
from megarl.trainers.generate import generate
from megarl.trainers.rl.train import train

pytestmark = pytest.mark.usefixtures("local_ray")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)  # fmt: skip


class Letters:
    """Three turns; each is worth its share of small letters."""

    turns = 0

    def reset(self, prompt: Prompt) -> str:
        return f"say letters after {prompt.row_id}"

    async def step(self, text: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"that was {len(text)}", sum(letter.islower() for letter in text) / max(len(text), 1), self.turns == 3


@pytest.fixture
def config(tiny_config: Callable[..., Config], tiny_model: Path, tmp_path: Path) -> Config:
    """The tiny model with a chat template of text alone."""
    model = tmp_path / "chatty"
    shutil.copytree(tiny_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    episode: dict[str, Any] = {"kind": "environment", "tools": ["tests.themes.e2e.test_episodes_run:Letters"], "max_turns": 4}
    return tiny_config(
        **{
            "model.path": str(model),
            "rollout.max_new_tokens": 150,
            "rollout.prompts_per_step": 2,
            "rollout.episode": episode,
            "rewards": [{"name": "environment"}],
            "algorithm.epochs": 2,
            "data.eval.limit": 2,
        }
    )


def test_a_run_of_conversations_passes_its_gates(config: Config) -> None:
    summary = train(config)
    assert summary["gates"]["log_prob_max_difference_as_loaded"] < 1e-4
    assert summary["gates"]["log_prob_max_difference_after_sync"] < 1e-4
    folder = Path(config.run_folder)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 8
    conversations = [sample for sample in samples if sample["turns"]]
    assert len(conversations) > 3
    for sample in conversations:
        assert sample["prompt_text"].startswith(f"user: say letters after {sample['row_id']}")
        said = [turn["content"] for turn in sample["turns"] if turn["role"] == "assistant"]
        assert sample["response_text"] == said[-1]
        told = [f"user: {turn['content']}.assistant: " for turn in sample["turns"] if turn["role"] == "user"]
        assert sample["sampled_mask"].count(0) == sum(map(len, told))  # a token is a letter, and <eos>
    (first, *_) = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] == 1]
    in_step = [sample for sample in samples if sample["step"] == 1]
    assert first["response/tokens_mean"] == sum(sum(sample["sampled_mask"]) for sample in in_step) / 8
    assert first["reward/mean"] == pytest.approx(sum(sample["rewards"]["environment"] for sample in in_step) / 8)
    assert first["episode/turns"] >= 8


def test_conversations_are_no_rows_to_train_on(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--as is 'sft', but rollout.episode.kind is 'environment'"):
        generate(config, str(tmp_path / "rows.jsonl"), "sft", None)
