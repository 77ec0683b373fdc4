"""Scales of keys and values in FP8: that no prompt overflows them, and that the embedded engine rounds as a formula does."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megarl.options.fp8_cache.embedded import SCALES, round_keys_and_values
from megarl.options.fp8_cache.scales import LARGEST, MARGIN, key_bound, rounded, row_bound, scale_for
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from tests.rollout.tiny import PROMPTS, load, reference_log_probs

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}


def biased() -> Qwen2ForCausalLM:
    """A Qwen2 whose biases of keys are as large as those of the published models."""
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.copy_(300 * torch.randn(32))
            layer.input_layernorm.weight.copy_(1 + 0.5 * torch.randn(64))
    return model


def normed() -> Qwen3ForCausalLM:
    """A Qwen3, which has a norm of each head's keys."""
    torch.manual_seed(2)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_norm.weight.copy_(150 * torch.randn(16))
    return model


def test_the_bound_of_a_layer_is_the_largest_that_any_input_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, norm = torch.randn(6, 32, generator=generator), torch.rand(32, generator=generator) + 0.5
    bias = 3 * torch.randn(6, generator=generator)
    reached = 0.0
    for number, row in enumerate(weight):
        for sign in (1, -1):
            hidden = sign * row * norm  # along the row as the norm weighs it
            normed = hidden.double() / hidden.double().pow(2).mean().sqrt() * norm.double()
            reached = max(reached, float((weight.double() @ normed + bias.double()).abs()[number]))
    assert reached == pytest.approx(row_bound(weight, norm, bias), rel=1e-6)


@pytest.mark.parametrize(("bound", "scale"), [(0.0, 1.0), (1.0, 1.0), (LARGEST / MARGIN, 1.0), (225.0, 2.0), (900.0, 8.0)])
def test_a_scale_is_the_smallest_power_of_two_with_room(bound: float, scale: float) -> None:
    assert scale_for(bound) == scale


@pytest.mark.parametrize("make", [biased, normed])
def test_no_key_or_value_passes_its_bound(make: Any) -> None:
    model = make()
    with torch.no_grad():
        cache = model(torch.randint(3, 500, (8, 64)), use_cache=True).past_key_values
    kept = [(layer.keys, layer.values) for layer in cache.layers]
    for layer, (keys, values) in zip(model.model.layers, kept, strict=True):
        attention, norm = layer.self_attn, layer.input_layernorm.weight
        key_norm = getattr(attention, "k_norm", None)
        of_keys = key_bound(
            attention.k_proj.weight, norm, attention.k_proj.bias, key_norm.weight if key_norm is not None else None
        )
        of_values = row_bound(attention.v_proj.weight, norm, attention.v_proj.bias)
        assert LARGEST / MARGIN < keys.abs().max() < of_keys  # with a scale of 1 there would be no room
        assert values.abs().max() < of_values < LARGEST
        assert of_keys / scale_for(of_keys) <= LARGEST / MARGIN


def test_rounding_is_that_of_the_format() -> None:
    values = torch.tensor([1.0, 1.06, 0.3, 447.0, 600.0, -3.3, 2.0**-10])
    # three bits behind the point; below 2^-6 steps of 2^-9; beyond 448 only with a scale
    expected = torch.tensor([1.0, 1.0, 0.3125, 448.0, 448.0, -3.25, 0.0])
    assert torch.equal(rounded(values, 1.0), expected)
    assert rounded(values, 2.0)[4] == 576.0  # of 300 the nearest are 288 and 320


def dense_log_probs(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Log-probs `[L, V]` of all next tokens in float64, layer by layer, keys and values rounded: Llama written out."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    config = model.config
    hidden = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    length, heads, groups = len(ids), config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    inverse = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    angles = torch.arange(length).double()[:, None] * inverse
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

    for number in range(config.num_hidden_layers):
        at = f"model.layers.{number}."
        x = norm(hidden, at + "input_layernorm.weight")
        q, k, v = (x @ weights[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
        q = rotated(q.view(length, heads, size))
        k, v = rotated(k.view(length, groups, size)), v.view(length, groups, size)
        k, v = (part.float().to(torch.float8_e4m3fn).double().repeat_interleave(heads // groups, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(length, -1)
        hidden = hidden + mixed @ weights[at + "self_attn.o_proj.weight"].T
        x = norm(hidden, at + "post_attention_layernorm.weight")
        gate, up = (x @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].T
    return (norm(hidden, "model.norm.weight") @ weights["lm_head.weight"].T).log_softmax(-1)


def test_the_embedded_engine_has_the_log_probs_of_the_formula(tiny_path: Path) -> None:
    engine = EmbeddedEngine(tiny_path, initial_version=0, changes=[round_keys_and_values])
    groups = asyncio.run(engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=12, ignore_eos=True), n=2)))
    model, plain = load(tiny_path), 0.0
    for layer in engine._model.model.layers:
        assert getattr(layer.self_attn, SCALES) == (1.0, 1.0)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for answer in group:
            ids = [*prompt, *answer.response_ids]
            expected = dense_log_probs(model, ids)[len(prompt) - 1 : -1]
            expected = expected.gather(1, torch.tensor(answer.response_ids)[:, None])[:, 0]
            assert (torch.tensor(answer.log_probs) - expected).abs().max() < 2e-3
            unrounded = reference_log_probs(model, prompt, answer.response_ids, 1.0)
            plain = max(plain, float((torch.tensor(answer.log_probs) - unrounded).abs().max()))
    assert plain > 0.02  # rounding is seen
