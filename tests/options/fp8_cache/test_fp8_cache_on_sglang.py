"""Real SGLang servers on a CPU that keep keys and values in FP8: their log-probs are those of rounding, before and after an
update, on one rank and on two, also where biases would be cut without a scale."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.options.fp8_cache.embedded import SCALES, round_keys_and_values
from megarl.options.fp8_cache.section import MARK
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from tests.options.fp8_cache.test_fp8_scales import biased, normed
from tests.rollout.tiny import PROMPTS, reference_log_probs, sync

SIZES = {"threads": 1, "max_total_tokens": 2048, "max_running_requests": 8, "start_timeout_s": 240.0}
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


def apart(model: Any, groups: list[list[Generation]]) -> torch.Tensor:
    """Differences of all answers' log-probs from the model's."""
    pairs = [(prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group]
    return torch.cat(
        [
            (torch.tensor(one.log_probs) - reference_log_probs(model, prompt, one.response_ids, 1.0)).abs()
            for prompt, one in pairs
        ]
    )


def assert_alike(found: torch.Tensor) -> None:
    """A key between two numbers of the format goes to either one, as sums are taken in another order: few of them do."""
    assert found.median() < 1e-5
    assert found.max() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("make", "tp"), [(biased, 1), (normed, 2)])
def test_a_server_has_the_log_probs_of_rounding(make: type, tp: int, tmp_path: Path) -> None:
    make().save_pretrained(folder := tmp_path / "model")
    options = ServerOptions(
        str(folder), tmp_path / "server.log", tp=tp, extra={"kv_cache_dtype": "fp8_e4m3", MARK: True}, **SIZES
    )  # type: ignore[arg-type]
    plain = EmbeddedEngine(folder)._model
    model = EmbeddedEngine(folder, changes=[round_keys_and_values])._model
    assert max(scale for layer in model.model.layers for scale in getattr(layer.self_attn, SCALES)) > 1

    async def scenario() -> None:
        engine = await SglangEngine.open(options, initial_version=0)
        try:
            groups = await engine.generate(EngineRequest(PROMPTS, PARAMS, n=2))
            assert_alike(apart(model, groups))
            assert apart(plain, groups).median() > 1e-3
            with torch.no_grad():
                for weight in model.parameters():  # the scales stay those of the start
                    weight += 0.02 * weight.abs().mean() * torch.randn(weight.shape, generator=torch.manual_seed(3))
            await sync(engine, [(name, weight.detach()) for name, weight in model.named_parameters()], 1)
            assert_alike(apart(model, await engine.generate(EngineRequest(PROMPTS, PARAMS, n=2))))
        finally:
            await engine.stop()

    asyncio.run(scenario())
