"""Experts that both servers chose, joined: the prompt's of the one that prefills, the response's of the one that decodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from tests.models.test_transformers_names import other_values
from tests.options.disaggregation.conftest import Pair
from tests.rollout.midway import midway
from tests.rollout.routed import chosen_experts
from tests.rollout.test_sglang_experts import served
from tests.rollout.updates import PROMPTS

pytestmark = pytest.mark.needs_option("routing_replay")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_experts_of_every_token_are_those_that_the_model_chooses_through_an_update(tmp_path: Path) -> None:
    folder = served("qwen3_moe", tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = other_values(folder)
    write_hf_folder(tmp_path / "sent", weights, HFFolder(folder).config)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "sent", dtype=torch.float32)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, extra=frozenset({"routes"}))

    async def scenario(pair: Pair) -> None:
        for _ in range(2):  # of prompts that are cached the choices are those that filled the cache
            groups = await pair.decode.generate(EngineRequest(PROMPTS, params, n=2))
            for prompt, group in zip(PROMPTS, groups, strict=True):
                for one in group:
                    ids = [*prompt, *one.response_ids]
                    np.testing.assert_array_equal(np.sort(one.extra["routes"]), chosen_experts(before, ids[:-1]))
        long = SamplingParams(max_new_tokens=300, ignore_eos=True, extra=frozenset({"routes"}))
        waiting = await midway(lambda: pair.decode.generate(EngineRequest(PROMPTS, long)))
        async with pair.updating(1):
            await asyncio.gather(pair.decode.apply_update(weights), pair.prefill.apply_update(weights))
        for prompt, [one] in zip(PROMPTS, await waiting, strict=True):
            assert {*one.weight_versions} == {0, 1}, "the update must come in the middle of a response"
            ids = [*prompt, *one.response_ids]
            np.testing.assert_array_equal(np.sort(one.extra["routes"]), chosen_experts(after, ids[:-1]))

    both = Pair(folder, tmp_path, enable_return_routed_experts=True)
    both.runner.run(both.start())
    try:
        both.run(scenario)
    finally:
        both.runner.run(both.stop())
        both.runner.close()
