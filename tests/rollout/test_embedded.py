"""The embedded engine alone: seeded sampling that does not depend on the batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import EngineError
from megarl.rollout.engines.drawing import sample
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from tests.rollout.tiny import PROMPTS

PARAMS = SamplingParams(max_new_tokens=10, temperature=0.9)


def responses(engine: EmbeddedEngine, prompts: list[list[int]], keys: list[str], n: int) -> list[list[list[int]]]:
    """Token ids of what the engine samples."""
    groups = asyncio.run(engine.generate(EngineRequest(prompts, PARAMS, n=n, keys=keys)))
    return [[one.response_ids for one in group] for group in groups]


def test_a_sample_depends_on_seed_and_key_but_not_on_its_batch(tiny_path: Path) -> None:
    engine = EmbeddedEngine(tiny_path, seed=3, initial_version=0)
    together = responses(engine, PROMPTS, ["a", "b", "c"], 3)
    alone = EmbeddedEngine(tiny_path, seed=3, max_batch_samples=2, initial_version=0)
    assert responses(alone, [PROMPTS[1]], ["b"], 3) == [together[1]]
    assert responses(engine, [PROMPTS[1]], ["other"], 3) != [together[1]]
    assert responses(EmbeddedEngine(tiny_path, seed=4, initial_version=0), PROMPTS, ["a", "b", "c"], 3) != together


@pytest.mark.parametrize(
    "limits", [{"top_k": 4, "top_p": 0.9}, {"min_p": 0.15}, {"top_k": 3, "min_p": 0.01}], ids=["top_p", "min_p", "top_k"]
)
def test_tokens_are_drawn_with_their_probabilities(limits: dict[str, Any]) -> None:
    """Frequencies over 40,000 draws against the exact distribution after temperature, top-k, top-p and min-p."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]])
    draws = 40_000
    params = SamplingParams(max_new_tokens=1, temperature=0.8, **limits)
    generators = [torch.Generator().manual_seed(0)] * draws
    tokens, log_probs = sample(logits.expand(draws, -1), params, generators)
    probs = (logits[0].double() / 0.8).softmax(0)
    kept = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)  # 0.68 + 0.20 + 0.11: the first three reach 0.9
    expected = probs * kept / (probs * kept).sum()
    assert probs[:2].sum() < 0.9 <= probs[:3].sum()
    assert probs[3] < 0.15 * probs[0] < probs[2]
    frequencies = tokens.bincount(minlength=5) / draws
    assert (frequencies - expected).abs().max() < 0.01
    assert torch.allclose(log_probs.double(), probs.log()[tokens], atol=1e-6)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be loaded as a Hugging Face model"):
        EmbeddedEngine(tmp_path)
