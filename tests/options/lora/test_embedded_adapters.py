"""The embedded engine with adapters: log-probs are peft's after every update, and what did not come whole is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.errors import EngineError
from megarl.models.adapters import LORA_B
from megarl.models.transformers_names import config_in_transformers
from megarl.options.lora.weight_map import Lora
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from tests.families import build_folder
from tests.options.lora.adapters import LORA, tensors, with_adapters
from tests.rollout.tiny import Weights, largest_difference

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13], [40, 41]]
WITH_OUTPUT = replace(LORA, targets=("all-linear", "lm_head"))
GREEDY = SamplingParams(max_new_tokens=6, greedy=True, ignore_eos=True)


class WithoutAdapters(EmbeddedEngine):
    """Takes adapters, and says so, but computes without them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        assert self._adapters is not None
        self._adapters.add = lambda: None  # type: ignore[method-assign]


async def update(engine: EmbeddedEngine, version: int, base: int | None, adapters: Weights) -> None:
    """An update of adapters in two buckets."""
    await engine.begin_update(version, base)
    await engine.apply_update(adapters[::2])
    await engine.apply_update(adapters[1::2])
    await engine.end_update(version)


def answers(engine: EmbeddedEngine) -> list[list[Generation]]:
    return asyncio.run(engine.generate(EngineRequest(PROMPTS, GREEDY)))


def peft_model(folder: Path, lora: Lora, scale: float) -> Any:
    """peft's model with seeded adapters, of which each B is multiplied by `scale`."""
    config = config_in_transformers(folder)
    made = with_adapters(AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32), folder, lora)
    with torch.no_grad():
        for name, values in made.named_parameters():
            if "lora_B" in name:
                values.mul_(scale)
    return made


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, LORA) for family in ("llama", "qwen3_moe", "deepseek_v3", "phi3", "gpt_oss", "qwen3_next")),
        ("llama", WITH_OUTPUT),
        ("qwen2", WITH_OUTPUT),  # tied
    ],
)
def test_log_probs_are_those_of_peft_after_each_update(family: str, lora: Lora, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_folder(family, folder)
    engine = EmbeddedEngine(folder, lora=lora, initial_version=0)
    assert largest_difference(peft_model(folder, lora, 0.0), PROMPTS, answers(engine)) < 1e-5
    for version, scale in ((1, 1.0), (2, -0.5), (3, 0.25)):
        made = peft_model(folder, lora, scale)
        asyncio.run(update(engine, version, version - 1, list(tensors(made).items())))
        groups = answers(engine)
        assert largest_difference(made, PROMPTS, groups) < 1e-5
        assert {version} == {each for group in groups for one in group for each in one.weight_versions}


def test_an_engine_without_its_adapters_is_told_by_its_log_probs(tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    made = peft_model(tmp_path / "model", LORA, 1.0)
    engine = WithoutAdapters(tmp_path / "model", lora=LORA)
    asyncio.run(update(engine, 1, None, list(tensors(made).items())))
    assert largest_difference(made, PROMPTS, answers(engine)) > 0.1


def test_adapters_that_are_not_whole_or_of_another_model_are_refused(tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    sent = list(tensors(peft_model(tmp_path / "model", LORA, 1.0)).items())
    engine = EmbeddedEngine(tmp_path / "model", lora=LORA)
    with pytest.raises(EngineError, match=rf"nobody sent .*{sent[-1][0]}"):
        asyncio.run(update(engine, 1, None, sent[:-1]))
    assert engine.weight_version is None
    name, values = next(pair for pair in sent if pair[0].endswith(LORA_B))
    for wrong, message in (
        (("model.layers.0.self_attn.other_proj.lora_A.weight", values), "no parameter model.layers.0.self_attn.other_proj"),
        (("model.embed_tokens.weight", values), "no parameter model.embed_tokens.weight"),
        ((name, torch.cat([values, values], 1)), rf"{name} was sent as .*; the model's is"),
    ):
        engine = EmbeddedEngine(tmp_path / "model", lora=LORA)
        with pytest.raises(EngineError, match=message):
            asyncio.run(update(engine, 1, None, [*sent, wrong]))


def test_values_that_changed_on_the_way_are_refused(tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    sent = list(tensors(peft_model(tmp_path / "model", LORA, 1.0)).items())
    engine = EmbeddedEngine(tmp_path / "model", lora=LORA)

    async def alter() -> None:
        await engine.begin_update(1)
        await engine.apply_update(sent)
        engine._held[sent[3][0]][0, 0] += 1e-6
        await engine.end_update(1)

    with pytest.raises(EngineError, match=f"1 differ.*values differ from those sent for {sent[3][0]}"):
        asyncio.run(alter())
