"""The experts that the embedded engine says it chose, also where weights change in mid-response; and those of a transcript."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.data.sample import Prompt
from megarl.errors import EngineError
from megarl.options.routing_replay.column import compact, known
from megarl.options.routing_replay.sglang import ExpertLayers
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.episodes.transcript import Transcript
from tests.families import build_folder
from tests.rollout.routed import chosen_experts
from tests.rollout.turning_engine import TurningEngine

PROMPTS = [[5, 6, 7, 8], [100, 9, 10, 11, 12, 13], [40, 41]]
PARAMS = SamplingParams(max_new_tokens=7, ignore_eos=True, extra=frozenset({"routes"}))


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model some of whose layers have experts."""
    path = tmp_path_factory.mktemp("models") / request.param
    build_folder(request.param, path)
    return path


def test_the_experts_of_every_token_are_those_that_the_model_chooses(folder: Path) -> None:
    engine, model = EmbeddedEngine(folder, initial_version=0), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = asyncio.run(engine.generate(EngineRequest(PROMPTS, PARAMS, n=2)))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            expected = chosen_experts(model, [*prompt, *one.response_ids[:-1]])
            np.testing.assert_array_equal(np.sort(one.extra["routes"]), expected)
    [[plain]] = asyncio.run(engine.generate(EngineRequest(PROMPTS[:1], SamplingParams(max_new_tokens=2))))
    assert not plain.extra


def test_a_response_under_two_versions_keeps_the_choices_of_the_last_one_alone(folder: Path) -> None:
    engine = TurningEngine(folder, initial_version=0)
    groups = asyncio.run(engine.generate(EngineRequest(PROMPTS, PARAMS)))
    for prompt, [one] in zip(PROMPTS, groups, strict=True):
        assert one.weight_versions == [0, 0, 0, 1, 1, 1, 1]
        expected = chosen_experts(engine._model, [*prompt, *one.response_ids[:-1]])
        np.testing.assert_array_equal(np.sort(one.extra["routes"]), expected)
        asked = Prompt("r", "g", prompt, "")
        transcript = Transcript(asked, 7)
        transcript.append_turn(one, "")
        sample = transcript.sample(asked, 0, "length")
        is_known = [True] * (len(prompt) - 1) + [False] * 3 + [True] * 4 + [False]
        assert known(sample.extra["routes"]).tolist() == [[value] * one.extra["routes"].shape[1] for value in is_known]
        np.testing.assert_array_equal(sample.extra["routes"][is_known], one.extra["routes"][is_known[:-1]])


def routes_of(tokens: int, first: int) -> Any:
    """Of one layer with 100 experts; each token has a choice of its own."""
    return compact(np.arange(first, first + tokens)[:, None, None] + np.array([0, 50]), 100)


@pytest.mark.parametrize("version", [3, 4])
def test_what_was_chosen_first_under_the_same_weights_stays(version: int) -> None:
    """A second turn is computed behind the first one, whose tokens the engine may have had to compute anew."""
    asked = Prompt("r", "g", [1, 2], "")
    transcript = Transcript(asked, 20)
    first, second = routes_of(4, 0), routes_of(9, 20)
    transcript.append_turn(Generation([5, 6, 7], [-1.0] * 3, [3] * 3, "stop", {"routes": first}), "")
    transcript.append_observation([8, 9], [])
    transcript.append_turn(Generation([5, 6, 7], [-1.0] * 3, [version] * 3, "stop", {"routes": second}), "")
    routes = transcript.sample(asked, 0, "stop").extra["routes"]
    if version == 3:
        np.testing.assert_array_equal(routes[:9], np.concatenate([first, second[4:]]))
    else:  # prompt, three choices that are gone, what was told, and the second turn
        assert known(routes)[:, 0].tolist() == [True, False, False, False, *[True] * 5, False]
        np.testing.assert_array_equal(routes[[0, *range(4, 9)]], second[[0, *range(4, 9)]])


LAYERS = ExpertLayers(layers=3, expert_layers=(1, 2), experts=8, top_k=2)


def test_of_what_a_server_says_of_every_layer_those_with_experts_are_taken() -> None:
    chosen = np.array([[[0, 0], [3, 1], [2, 7]], [[0, 0], [6, 5], [4, 4]]], np.int32)  # of the second token one is no choice
    answer = {"meta_info": {"routed_experts": base64.b64encode(chosen.tobytes()).decode()}}
    assert LAYERS.routes(answer, 2, "http://engine").tolist() == [[[3, 1], [2, 7]], [[6, 5], [255, 255]]]


@pytest.mark.parametrize(
    ("answered", "message"),
    [
        ({}, "answered without the experts that it chose"),
        ({"routed_experts": "AAAA"}, "experts that are not those of 3 layers with 2 each"),
        ({"routed_experts": "%%"}, "experts that are not those of 3 layers with 2 each"),
        ({"routed_experts": "A" * 32}, "the experts of 1 tokens; there must be those of 4"),
    ],
)
def test_a_server_that_does_not_say_what_it_chose_is_refused(answered: dict[str, str], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        LAYERS.routes({"meta_info": answered}, 4, "http://engine")
