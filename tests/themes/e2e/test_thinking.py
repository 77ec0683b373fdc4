"""A tiny model with Qwen3's template: SFT with a sample for each turn, and GRPO with and without thinking on real SGLang."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config import Config, parse_supervised_config
from megarl.trainers.rl.train import train
from megarl.trainers.supervised.train import train as train_supervised
from tests.data.chat_tokenizers import family_tokenizer
from tests.data.family_templates import FAMILIES
from tests.themes.e2e.records import curve

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"{a}+{b}?"},
            {"role": "assistant", "content": f"<think>\n{a} and {b}\n</think>\n\n{a + b}"},
            {"role": "user", "content": "And one more?"},
            {"role": "assistant", "content": f"<think>\n{a + b} and 1\n</think>\n\n{a + b + 1}"},
        ]
    }
    for a, b in ((1, 2), (5, 3))
]
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokens are bytes, under Qwen3's template."""
    family = FAMILIES["Qwen3"]
    tokenizer = family_tokenizer(family.template, special=family.special, plain=family.plain, eos=family.eos)
    folder = tmp_path_factory.mktemp("models") / "thinking"
    tokenizer.pad_token = family.special[0]
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    end = tokenizer.convert_tokens_to_ids(family.eos)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None, eos_token_id=end,
        pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def test_a_sample_of_each_turn_has_the_loss_of_that_turn_behind_its_own_prompt(thinking_model: Path, tmp_path: Path) -> None:
    """The first update's loss is Hugging Face's on prompts as an engine would be sent them: without earlier thoughts."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = parse_supervised_config(
        {
            "run": {"folder": str(tmp_path / "runs"), "steps": 2},
            "model": {"path": str(thinking_model), "dtype": "float32"},
            "policy": {"max_tokens_per_micro_batch": 512, "threads_per_rank": 1, "layout": {"dp": 2}},
            "objective": {"name": "sft"},
            "data": {
                "train": {"source": "jsonl", "path": str(rows)}, "rows_per_step": len(ROWS), "max_tokens": 400,
                "turns": "each",
            },
        }
    )  # fmt: skip
    train_supervised(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinking_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(thinking_model, dtype=torch.float32)
    losses = []
    for row in ROWS:
        for at in (1, 3):
            prompt = tokenizer.apply_chat_template(row["messages"][:at], add_generation_prompt=True, tokenize=False)
            whole = tokenizer.apply_chat_template(row["messages"][: at + 1], tokenize=False).removesuffix("\n")
            assert whole.startswith(prompt)
            assert "<think>" in whole[len(prompt) :]
            assert "<think>" not in prompt
            asked, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole))
            logits = model(torch.tensor([ids])).logits[0, len(asked) - 1 : -1].double()
            losses.append(-logits.log_softmax(-1).gather(1, torch.tensor(ids[len(asked) :])[:, None])[:, 0])
    first = next(row for row in curve(Path(config.run_folder)) if "train/loss" in row)
    assert first["train/loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("thinks", "engine"),
    [
        pytest.param(True, "sglang", id="thinking"),
        pytest.param(False, "embedded", id="without thinking"),
        # an engine is sent token ids: what the template makes is the same for both, and the first case has the server
        pytest.param(False, "sglang", id="without thinking, SGLang", marks=pytest.mark.exhaustive),
    ],
)
def test_grpo_trains_with_and_without_thinking(
    thinking_model: Path, tiny_config: Callable[..., Config], thinks: bool, engine: str
) -> None:
    more: dict[str, Any] = {
        "model.path": str(thinking_model), "rollout.engine": engine, "run.steps": 2, "data.max_prompt_tokens": 256,
        "data.template_args": {"enable_thinking": thinks}, "rollout.max_new_tokens": 12,
    }  # fmt: skip
    config = tiny_config(**more)
    assert train(config)["gates"]["log_prob_max_difference_after_sync"] < 1e-4
    samples = [json.loads(line) for line in (Path(config.run_folder) / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert all(sample["prompt_text"].endswith(EMPTY) is not thinks for sample in samples)
