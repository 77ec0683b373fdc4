"""Speculative decoding in the embedded engine: responses are distributed as without it, whatever the draft."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.errors import ConfigError
from megarl.options.prediction import embedded as embedded_speculative
from megarl.options.prediction.column import DraftCounts
from megarl.options.prediction.embedded_drafts import looked_up
from megarl.options.prediction.section import SpeculativeConfig
from megarl.rollout.engines import drawing
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from tests.options.prediction.drafted import END, exact_distribution, load, p_value, predicted, write_model
from tests.rollout.routed import chosen_experts
from tests.rollout.tiny import largest_difference
from tests.rollout.turning_engine import TurningEngine

POLICIES = ("llama", "window", "gemma3", "olmo3", "gpt_oss", "glm4_moe", "deepseek_v3")
DRAWS = 10_000
PROMPT = [1, 2, 1, 2]
LIMITS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 3, "temperature": 1.3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "all": {"top_k": 3, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Policies of four tokens, and `bad`: a draft for them with other weights, which is nearly sure of what it says."""
    parent = tmp_path_factory.mktemp("few-tokens")
    found = {kind: write_model(parent / kind, kind, 4) for kind in POLICIES}
    return found | {"bad": write_model(parent / "bad", "llama", 4, seed=5, spread=0.6)}


def settings(algorithm: str, folders: dict[str, Path], steps: int = 2) -> SpeculativeConfig:
    """`standalone:<name>` has the draft of that name."""
    algorithm, _, name = algorithm.partition(":")
    draft_model = str(folders[name]) if name else None
    return SpeculativeConfig.model_validate({"algorithm": algorithm, "num_steps": steps, "draft_model": draft_model})


def drawn(
    folder: Path, speculative: SpeculativeConfig, params: SamplingParams, n: int = DRAWS, prompt: list[int] = PROMPT
) -> list[Generation]:
    engine = EmbeddedEngine(folder, seed=11, initial_version=0, max_batch_samples=2500, speculative=speculative)
    [responses] = asyncio.run(engine.generate(EngineRequest([prompt], params, n=n, keys=["a"])))
    return responses


CASES = [
    ("llama", "none", "temperature"),
    ("llama", "ngram", "temperature"),
    ("llama", "ngram", "all"),
    ("llama", "standalone:bad", "temperature"),
    ("llama", "standalone:bad", "top_p"),
    ("glm4_moe", "mtp", "temperature"),
    ("glm4_moe", "mtp", "top_k"),
    ("glm4_moe", "mtp", "min_p"),
    ("deepseek_v3", "mtp", "all"),
    ("window", "standalone:bad", "temperature"),
    ("gemma3", "ngram", "top_k"),
    ("gemma3", "standalone:bad", "temperature"),
    ("olmo3", "standalone:bad", "all"),
    ("gpt_oss", "standalone:window", "temperature"),
]


@pytest.mark.parametrize(("policy", "algorithm", "limits"), CASES, ids=lambda value: str(value))
def test_responses_have_their_exact_probabilities(folders: dict[str, Path], policy: str, algorithm: str, limits: str) -> None:
    """Chi-square over 10,000 responses of up to five tokens against the probabilities of each."""
    params = SamplingParams(max_new_tokens=5, **LIMITS[limits])
    responses = drawn(folders[policy], settings(algorithm, folders), params)
    assert p_value(responses, exact_distribution(load(folders[policy]), PROMPT, params)) > 0.01
    total = sum((one.extra.get("drafts", DraftCounts()) for one in responses), DraftCounts())
    if algorithm == "none":
        assert total == DraftCounts()
    else:
        assert 0 < total.accepted < total.drafted


def always_accepted(weights: torch.Tensor, proposals: drawing.Proposals, numbers: torch.Tensor) -> Any:
    """What a careless engine does."""
    return proposals.counts, drawing.verify(weights, proposals, numbers)[1]


def drawn_from_the_policy(weights: torch.Tensor, proposals: drawing.Proposals, numbers: torch.Tensor) -> Any:
    """Another one: behind a refused token it draws from p in place of max(0, p - q)."""
    accepted, _ = drawing.verify(weights, proposals, numbers)
    rows = torch.arange(len(accepted))
    return accepted, drawing.draw(weights[rows, accepted], numbers[:, -1])


@pytest.mark.parametrize("wrong", [always_accepted, drawn_from_the_policy])
@pytest.mark.parametrize(("policy", "algorithm"), [("llama", "ngram"), ("llama", "standalone:bad"), ("glm4_moe", "mtp")])
def test_the_chi_square_test_sees_a_wrong_rule(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, wrong: Any, policy: str, algorithm: str
) -> None:
    monkeypatch.setattr(embedded_speculative, "verify", wrong)
    params = SamplingParams(max_new_tokens=5)
    responses = drawn(folders[policy], settings(algorithm, folders), params)
    assert p_value(responses, exact_distribution(load(folders[policy]), PROMPT, params)) < 1e-6


MANY = 23
"""Tokens of the models whose long responses are compared token for token."""
PROMPTS = [[5, 6, 7, 5, 6, 7, 8], [20], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]]
LONG = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.7)


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Policies of 23 tokens, some with windows shorter than a response, and a draft for them."""
    parent = tmp_path_factory.mktemp("wider")
    return {kind: write_model(parent / kind, kind, MANY) for kind in POLICIES}


def opened(folder: Path, algorithm: str, folders: dict[str, Path], **more: Any) -> EmbeddedEngine:
    return EmbeddedEngine(folder, seed=3, initial_version=0, speculative=settings(algorithm, folders, steps=3), **more)


WAYS = [
    ("llama", "ngram"),
    ("llama", "standalone:window"),
    ("window", "standalone:llama"),
    ("window", "standalone:window"),
    ("gemma3", "standalone:olmo3"),
    ("olmo3", "standalone:gemma3"),
    ("olmo3", "ngram"),
    ("gpt_oss", "standalone:llama"),
    ("glm4_moe", "mtp"),
    ("deepseek_v3", "mtp"),
]


@pytest.mark.parametrize(("policy", "algorithm"), WAYS, ids=lambda value: str(value))
def test_greedy_texts_are_those_of_plain_decoding(wider: dict[str, Path], policy: str, algorithm: str) -> None:
    greedy = SamplingParams(max_new_tokens=40, greedy=True, ignore_eos=True)
    plain, speculative = (
        asyncio.run(opened(wider[policy], kind, wider).generate(EngineRequest(PROMPTS, greedy))) for kind in ("none", algorithm)
    )
    assert [one.response_ids for [one] in speculative] == [one.response_ids for [one] in plain]
    for [one], [other] in zip(speculative, plain, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


@pytest.mark.parametrize(("policy", "algorithm"), WAYS, ids=lambda value: str(value))
def test_log_probs_and_experts_are_those_of_whole_passes(wider: dict[str, Path], policy: str, algorithm: str) -> None:
    """Also of responses that were stopped at different places in a pass, and so left other rows of the batch."""
    engine, model = opened(wider[policy], algorithm, wider), load(wider[policy])
    has_experts = policy != "gpt_oss" and any(getattr(recorder, "num_experts", 0) for recorder in engine._recorders)
    for ignores_ends in (True, False):
        columns = frozenset({"routes"} if has_experts else ())
        params = SamplingParams(max_new_tokens=24, ignore_eos=ignores_ends, temperature=0.7, extra=columns)
        groups = asyncio.run(engine.generate(EngineRequest(PROMPTS, params, n=4)))
        assert largest_difference(model, PROMPTS, groups, 0.7) < 1e-5
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for one in group:
                ended = one.response_ids[-1] == END and not ignores_ends
                assert (one.finish_reason == "stop") == ended
                assert ended or len(one.response_ids) == 24
                assert ignores_ends or END not in one.response_ids[:-1]
                drafts = one.extra.get("drafts", DraftCounts())  # none where the first token ends it
                assert drafts.passes + drafts.accepted <= len(one.response_ids) <= 1 + 4 * drafts.passes
                if columns:
                    expected = chosen_experts(model, [*prompt, *one.response_ids[:-1]])
                    np.testing.assert_array_equal(np.sort(one.extra["routes"]), expected)


@pytest.mark.parametrize(("policy", "algorithm"), [("llama", "standalone:window"), ("glm4_moe", "mtp"), ("llama", "ngram")])
def test_a_sample_does_not_depend_on_its_batch(wider: dict[str, Path], policy: str, algorithm: str) -> None:
    together = asyncio.run(
        opened(wider[policy], algorithm, wider).generate(EngineRequest(PROMPTS, LONG, n=3, keys=["a", "b", "c"]))
    )
    small = opened(wider[policy], algorithm, wider, max_batch_samples=2)
    [alone] = asyncio.run(small.generate(EngineRequest(PROMPTS[1:2], LONG, n=3, keys=["b"])))
    assert [one.response_ids for one in alone] == [one.response_ids for one in together[1]]
    assert [one.extra["drafts"] for one in alone] == [one.extra["drafts"] for one in together[1]]


@pytest.mark.parametrize("policy", ["glm4_moe", "deepseek_v3"])
def test_the_prediction_layer_drafts_what_whole_passes_of_its_formula_predict(folders: dict[str, Path], policy: str) -> None:
    """Passes, drafts and accepted tokens of greedy responses, against drafts of passes without a cache."""
    greedy, prompts = (
        SamplingParams(max_new_tokens=30, greedy=True, ignore_eos=True),
        [[1, 2, 3, 3, 2], [2], [3, 1, 1, 2, 0, 2, 3]],
    )
    groups = asyncio.run(opened(folders[policy], "mtp", folders).generate(EngineRequest(prompts, greedy)))
    expected = [predicted(folders[policy], ids, 30, 3) for ids in prompts]
    assert [(one.response_ids, one.extra["drafts"]) for [one] in groups] == expected
    drafts = [one.extra["drafts"] for [one] in groups]
    assert any(0 < one.accepted < one.drafted for one in drafts), drafts


def test_all_that_the_policy_itself_drafts_stays(wider: dict[str, Path]) -> None:
    """One token behind the prompt, then four a pass."""
    [[one]] = asyncio.run(opened(wider["llama"], "standalone:llama", wider).generate(EngineRequest(PROMPTS[:1], LONG)))
    assert one.extra["drafts"] == DraftCounts(passes=6, drafted=3 * 5 + 2, accepted=3 * 5 + 2)


def test_a_lookup_proposes_what_followed_the_longest_run_when_it_came_last() -> None:
    assert looked_up([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 2) == [9, 2]  # 1 2 3 before 2 3, which came later
    assert looked_up([1, 2, 5, 1, 2, 6, 1, 2], 5) == [6, 1, 2]
    assert looked_up([4, 4], 3) == [4]
    assert looked_up([1, 2, 3], 3) == []
    assert looked_up([1], 3) == []


@pytest.mark.parametrize(("policy", "algorithm"), [("llama", "ngram"), ("llama", "standalone:window"), ("glm4_moe", "mtp")])
def test_each_token_has_the_version_and_log_prob_of_the_weights_that_verified_it(
    wider: dict[str, Path], policy: str, algorithm: str
) -> None:
    routed = policy == "glm4_moe"
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.7, extra=frozenset({"routes"} if routed else ()))
    engine = TurningEngine(wider[policy], seed=3, initial_version=0, speculative=settings(algorithm, wider, steps=3))
    groups = asyncio.run(engine.generate(EngineRequest(PROMPTS, params)))
    for prompt, [one] in zip(PROMPTS, groups, strict=True):
        turn = one.weight_versions.index(1)
        assert one.weight_versions == [0] * turn + [1] * (24 - turn)
        assert 3 <= turn <= 1 + 2 * 4
        for version, model in enumerate((load(wider[policy]), engine._model)):
            whole = model(torch.tensor([[*prompt, *one.response_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = (whole / 0.7).log_softmax(-1).gather(1, torch.tensor(one.response_ids)[:, None])[:, 0].detach()
            own = slice(0, turn) if version == 0 else slice(turn, None)
            np.testing.assert_allclose(one.log_probs[own], expected[own], atol=1e-5)
        if routed:
            expected = chosen_experts(engine._model, [*prompt, *one.response_ids[:-1]])
            np.testing.assert_array_equal(np.sort(one.extra["routes"]), expected)


@pytest.mark.parametrize(
    ("policy", "algorithm", "message"),
    [
        (
            "qwen3_next",
            "ngram",
            "which needs a cache that can be cut back, but the model has layers with linear",
        ),
        ("llama", "mtp", "algorithm is 'mtp', which drafts with the layer.*has no model.layers.2.eh_proj.weight; it must be"),
        ("llama", "standalone:qwen3_next", "cannot draft: the model has layers with linear attention"),
        (
            "llama",
            "standalone:few",
            "draft_model is '.*which cannot draft: it has 4 tokens; it must be .* policy's 23",
        ),
    ],
)
def test_what_cannot_be_done_exactly_is_refused(
    wider: dict[str, Path], tmp_path: Path, policy: str, algorithm: str, message: str
) -> None:
    folders = wider | {"few": write_model(tmp_path / "few", "llama", 4)}
    folders["qwen3_next"] = write_model(tmp_path / "qwen3_next", "qwen3_next", MANY)
    with pytest.raises(ConfigError, match=message):
        opened(folders[policy], algorithm, folders)
