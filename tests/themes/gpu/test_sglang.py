"""SGLang on a GPU samples with the log-probs that the trainer computes."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.data.stream import Response, Unit
from tests.themes.gpu.models import role_for, root_mean_square

PROMPTS = [[5, 17, 200, 31], [901, 3, 77, 512, 640, 8]]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_the_engine_and_the_trainer_agree(rank: None, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    from megarl.rollout.engines.protocol import Generation, SamplingParams
    from megarl.rollout.engines.sglang.engine import SglangEngine
    from megarl.rollout.engines.sglang.server import ServerOptions

    async def sample() -> list[list[Generation]]:
        options = ServerOptions(
            model_path=str(folder_of("llama")), log_file=tmp_path / "engine.log", device="cuda", dtype="bfloat16",
            mem_fraction_static=0.3, memory_saver=False, max_total_tokens=8192,
        )  # fmt: skip
        engine = await SglangEngine.open(options, initial_version=0)
        try:
            return await engine.generate(PROMPTS, SamplingParams(max_new_tokens=32, ignore_eos=True), n=4)
        finally:
            await engine.stop()

    units, engine_log_probs = [], []
    for prompt, answers in zip(PROMPTS, asyncio.run(sample()), strict=True):
        for answer in answers:
            tokens = torch.tensor(answer.response_ids)
            mask = torch.ones(len(tokens), dtype=torch.bool)
            units.append(Unit(torch.tensor(prompt), [Response(len(units), tokens, mask, {})]))
            engine_log_probs.append(torch.tensor(answer.log_probs))
    exact = role_for(folder_of("llama"), trainable=False)
    answers = exact.forward([units])
    trainer = torch.cat([answers[index][:, 0].float().cpu() for index in sorted(answers)])
    # The engine computes in BF16, the trainer here in float32: logits of size 1 to 4 are off by 2^-8 of themselves per layer.
    assert root_mean_square(trainer - torch.cat(engine_log_probs)) < 0.05
