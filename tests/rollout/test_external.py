"""A real SGLang server as one that somebody else started: weights from a folder, responses under them, and refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megarl.errors import EngineError
from megarl.models.registry import load_hf_config
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.external import ExternalEngine
from megarl.weights.model_compatibility import ServedModel
from tests.rollout.tiny import PROMPTS, largest_difference, load, sync, weights_of


def facts(tiny_path: Path, **changed: object) -> ServedModel:
    """The trainer's model."""
    return ServedModel(load_hf_config(tiny_path) | changed, "float32")


def test_a_running_server_answers_under_the_weights_of_the_folder_that_it_was_given(
    sglang_engine: SglangEngine, tiny_path: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        server = sglang_engine.server
        engine = await ExternalEngine.at(server.url, server.token, facts(tiny_path), 30.0)
        with pytest.raises(EngineError, match="no weights of a known version"):
            await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=2)))
        for version, seed in ((1, 11), (2, 12)):
            model = load(tiny_path, seed=seed)
            model.save_pretrained(tmp_path / str(version))
            await engine.begin_update(version)
            await engine.load_update(str(tmp_path / str(version)))
            await engine.end_update(version)
            groups = await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0.7), n=2))
            assert largest_difference(model, PROMPTS, groups, 0.7) < 1e-5
            assert {v for group in groups for one in group for v in one.weight_versions} == {version}
        await engine.begin_update(3)
        with pytest.raises(EngineError, match="update_weights_from_disk"):
            await engine.load_update(str(tmp_path / "nowhere"))
        await engine.abandon_update()
        with pytest.raises(EngineError, match="no weights of a known version"):
            await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=2)))
        await engine.stop()
        assert server.alive  # it is not ours to end
        await sync(sglang_engine, weights_of(load(tiny_path)), 90)  # for the tests that share it

    asyncio.run(scenario())


def test_a_server_of_another_model_without_its_key_or_that_is_none_is_refused(
    sglang_engine: SglangEngine, tiny_path: Path
) -> None:
    server = sglang_engine.server
    with pytest.raises(EngineError, match=r"urls: http.*the engine's model has a vocabulary of \d+, the trainer's 77"):
        asyncio.run(ExternalEngine.at(server.url, server.token, facts(tiny_path, vocab_size=77), 30.0))
    with pytest.raises(EngineError, match=r"answered 401; its --api-key goes into MEGARL_ENGINE_TOKEN"):
        asyncio.run(ExternalEngine.at(server.url, "wrong", facts(tiny_path), 0.0))
    with pytest.raises(EngineError, match=r"urls: http://127.0.0.1:9/model_info did not answer"):
        asyncio.run(ExternalEngine.at("http://127.0.0.1:9", None, facts(tiny_path), 0.0))
