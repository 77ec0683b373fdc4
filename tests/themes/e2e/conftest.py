"""One local Ray for all end-to-end runs, and a tiny model folder with a tokenizer that spells."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megarl.config import Config, parse_config
from megarl.observe import read_metrics
from tests.observe.documented import undocumented

CHARACTERS = [*string.digits, *string.ascii_lowercase, *string.ascii_uppercase, *" +-=.,:?*/()'\""]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama (4 layers, 4 heads, 2 KV heads) whose tokens are characters."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<eos>", *CHARACTERS])}
    spelling = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    spelling.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    spelling.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=spelling, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE (3 layers with 6 experts each, of which a token uses 2) that spells as the tiny model does."""
    folder = tmp_path_factory.mktemp("models") / "experts"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=1,
        initializer_range=0.2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a sequence classifier with a random head."""
    config = transformers.AutoConfig.from_pretrained(tiny_model, num_labels=1)
    model = transformers.LlamaForSequenceClassification.from_pretrained(tiny_model, config=config, dtype=torch.float32)
    torch.manual_seed(3)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    folder = tmp_path_factory.mktemp("reward") / "model"
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


OWN_METRIC = "policy/own"
"""What the losses of a user in these tests say of themselves."""


@pytest.fixture(autouse=True)
def every_metric_of_a_run_is_documented(tmp_path: Path) -> Iterator[None]:
    """Whatever the runs of a test logged is in docs/metrics.md, with a unit."""
    yield
    files = tmp_path.rglob("metrics.jsonl")
    assert set(undocumented(name for file in files for row in read_metrics(file) for name in row)) <= {OWN_METRIC}


@pytest.fixture
def tiny_config(tiny_model: Path, tmp_path: Path) -> Callable[..., Config]:
    """`tiny_config(**{"run.name": "a", ...})`: a small run on the tiny model with dotted overrides."""

    def make(**overrides: Any) -> Config:
        task = {"source": "reasoning_gym", "name": "chain_sum"}
        task["args"] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        tree: dict[str, Any] = {
            "run": {"folder": str(tmp_path / "runs"), "steps": 2, "log_samples": 1000},
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "policy": {"max_tokens_per_micro_batch": 512, "threads_per_rank": 1, "optimizer": {"lr": 1e-3}},
            "critic": {"max_tokens_per_micro_batch": 512, "threads_per_rank": 1, "optimizer": {"lr": 1e-3}},
            "data": {"train": task | {"limit": 64}, "eval": task | {"limit": 8}, "max_prompt_tokens": 96},
            "rollout": {"engine": "embedded", "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6},
            "rewards": [{"name": f"{Path(__file__).parent / 'digits.py'}:share_of_digits"}],
        }
        for name, value in overrides.items():
            place = tree
            *path, last = name.split(".")
            for key in path:
                place = place.setdefault(key, {})
            place[last] = value
        return parse_config(tree)

    return make
