"""Tiny random Hugging Face models of every family and shape that the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

REAL_MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Tiny:
    """`hf_config` as in config.json, and `tensors` as the model's safetensors file would hold them."""

    family: str
    hf_config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    model: Any


def build_tiny(family: str, *, heads: int = 4, groups: int = 2, tied: bool = False, **overrides: Any) -> Tiny:
    """A random float32 model of `family`, every parameter random (norms and biases too), heads not hidden/heads wide."""
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 12,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    } | overrides
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model = model_class(getattr(transformers, f"{name}Config")(**settings)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in parameter_name else 0.0
            parameter.copy_(centre + torch.randn(parameter.shape, generator=generator) * 0.3)
    hf_config = model.config.to_dict() | {"architectures": [model_class.__name__]}
    tensors = {key: value for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    return Tiny(family, hf_config, tensors, model)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Tiny]:
    """`build_tiny`, each distinct model built once."""
    built: dict[str, Tiny] = {}

    def get(family: str, **settings: Any) -> Tiny:
        key = repr((family, sorted(settings.items())))
        if key not in built:
            built[key] = build_tiny(family, **settings)
        return built[key]

    return get


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the real model."""
    if not (REAL_MODEL / "model.safetensors").exists():
        pytest.skip("models/SmolLM2-135M-Instruct is absent (make model)")
    return REAL_MODEL
