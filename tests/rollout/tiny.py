"""The tiny model of these tests, the weights they send and where, and the reference log-probs by Hugging Face in float32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.rollout.engines.protocol import Engine, Generation

TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.2,
)
PROMPTS = [[5, 6, 7, 8], [300, 9, 10, 11, 12, 13, 14, 15, 16], [400, 401]]
CONNECTIONS = count()
"""Numbers of the process groups of the shared server, in whatever file: its store keeps the addresses of each."""
Weights = list[tuple[str, torch.Tensor]]


def save_tiny(folder: Path, config: LlamaConfig) -> Path:
    """Save a model of `config` with seeded random weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def load(folder: Path, seed: int | None = None) -> LlamaForCausalLM:
    """The model of `folder` in float32; with a `seed`, moved away from it by a little noise."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if seed is not None:
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=noise)
    return model


def weights_of(model: LlamaForCausalLM) -> Weights:
    """Its parameters by Hugging Face name (tied embeddings once)."""
    return [(name, weight.detach()) for name, weight in model.named_parameters()]


def weights_that_never_end(folder: Path) -> Weights:
    """Weights under which the end token is never sampled.

    Dimension 0 of the residual stream is 10 for every token (nothing writes to it after the embedding), and the end token
    alone points away from it.
    """
    model = load(folder)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = 10.0
        embeddings[TINY.eos_token_id, 0] = -50.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    return weights_of(model)


def halves(weights: Weights) -> list[Weights]:
    """`weights` as two buckets, cut so that q, k and v of one layer do not travel together."""
    cut = next(i for i, (name, _) in enumerate(weights) if name.endswith("1.self_attn.k_proj.weight"))
    return [weights[:cut], weights[cut:]]


async def sync(engine: Engine, weights: Weights, version: int) -> None:
    """A whole update through the engine itself."""
    await engine.begin_update(version)
    for bucket in halves(weights):
        await engine.apply_update(bucket)
    await engine.end_update(version)


def reference_log_probs(
    model: LlamaForCausalLM, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> torch.Tensor:
    """Log-probs [len(response)] of `response` after `prompt`, one full forward pass without cache or padding."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def largest_difference(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], groups: list[list[Generation]], temperature: float = 1.0
) -> float:
    """Largest |engine's log-prob - reference| over all tokens."""
    worst = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        for one in group:
            expected = reference_log_probs(model, prompt, one.response_ids, temperature)
            worst = max(worst, (torch.tensor(one.log_probs) - expected).abs().max().item())
    return worst
