"""The experts that SGLang says it chose are those that the model chooses: behind cached prompts, turns and retractions."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.data.columns import unknown
from megarl.data.sample import Prompt
from megarl.models.hf_folder import HFFolder, write_hf_folder
from megarl.options.routing_replay.column import known
from megarl.options.routing_replay.sglang import RETURNS_ROUTES
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from megarl.rollout.episodes.transcript import Transcript
from tests.models.test_transformers_names import other_values, update
from tests.rollout.routed import chosen_experts
from tests.rollout.test_sglang_experts import served
from tests.rollout.updates import PROMPTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp", "arguments", "retracts"),
    [
        ("qwen3_moe", 1, {}, False),
        pytest.param("glm4_moe", 2, {}, False, marks=pytest.mark.exhaustive),  # its first layer has no experts
        pytest.param("mixtral", 2, {"ep_size": 2}, False, marks=pytest.mark.exhaustive),
        pytest.param(
            "qwen3_moe", 2, {"ep_size": 2, "dp_size": 2, "enable_dp_attention": True}, False, marks=pytest.mark.exhaustive
        ),
        pytest.param("qwen3_moe", 1, {}, True, marks=pytest.mark.exhaustive),
    ],
)
def test_the_experts_of_every_token_are_those_that_the_model_chooses(
    family: str, tp: int, arguments: dict[str, Any], retracts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a server that retracts responses all the time, as one does whose cache is full."""
    if retracts:
        monkeypatch.setenv("SGLANG_TEST_RETRACT", "true")
    folder = served(family, tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = other_values(folder)
    write_hf_folder(tmp_path / "sent", weights, HFFolder(folder).config)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "sent", dtype=torch.float32)
    sizes = {"threads": 1, "max_total_tokens": 4096, "max_running_requests": 8}
    extra = {**arguments, RETURNS_ROUTES: True}
    options = ServerOptions(str(folder), tmp_path / "log", tp=tp, extra=extra, **sizes, start_timeout_s=400)  # type: ignore[arg-type]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, extra=frozenset({"routes"}))

    async def scenario() -> None:
        engine = await SglangEngine.open(options, 0)
        try:
            groups = await engine.generate(EngineRequest(PROMPTS, params, n=2))
            for prompt, group in zip(PROMPTS, groups, strict=True):
                for one in group:
                    ids = [*prompt, *one.response_ids]
                    np.testing.assert_array_equal(np.sort(one.extra["routes"]), chosen_experts(before, ids[:-1]))
            turns = Transcript(Prompt("r", "g", PROMPTS[0], ""), 100)
            turns.append_turn(groups[0][0], "")
            turns.append_observation([50, 51, 52], [])
            [[second]] = await engine.generate(EngineRequest([turns.ids], params))
            turns.append_turn(second, "")
            whole = turns.sample(Prompt("r", "g", PROMPTS[0], ""), 0, "stop")
            assert known(whole.extra["routes"])[:-1].all()
            np.testing.assert_array_equal(np.sort(whole.extra["routes"][:-1]), chosen_experts(before, turns.ids[:-1]))
            plain = await engine.generate(EngineRequest(PROMPTS[:1], SamplingParams(max_new_tokens=2)))
            assert not plain[0][0].extra

            long = SamplingParams(max_new_tokens=400, ignore_eos=True, extra=frozenset({"routes"}))
            began = time.monotonic()
            await engine.generate(EngineRequest(PROMPTS, long))
            seconds = time.monotonic() - began
            waiting = asyncio.ensure_future(engine.generate(EngineRequest(PROMPTS, long)))
            await asyncio.sleep(seconds / 2)
            await update(engine, weights, 1)
            for prompt, [one] in zip(PROMPTS, await waiting, strict=True):
                assert {*one.weight_versions} == {0, 1}, "the update must come in the middle of a response"
                ids = [*prompt, *one.response_ids]
                np.testing.assert_array_equal(np.sort(one.extra["routes"]), chosen_experts(after, ids[:-1]))
                turns = Transcript(Prompt("r", "g", prompt, ""), 400)
                turns.append_turn(one, "")
                sample = turns.sample(Prompt("r", "g", prompt, ""), 0, "length")
                old = one.weight_versions.count(0)
                kept = [True] * (len(prompt) - 1) + [False] * old + [True] * (len(one.response_ids) - old) + [False]
                assert known(sample.extra["routes"])[:, 0].tolist() == kept
                routes = sample.extra["routes"]
                assert routes[-1].tolist() == [[unknown(routes.dtype)] * routes.shape[2]] * routes.shape[1]
            assert ("Testing retraction" in (tmp_path / "log").read_text()) is retracts
        finally:
            await engine.stop()

    asyncio.run(scenario())
