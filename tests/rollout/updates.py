"""An SGLang server that is sent other weights: what it then answers, and what it says of an update that is not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.errors import EngineError
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.sglang.engine import SglangEngine
from megarl.rollout.engines.sglang.server import ServerOptions
from tests.models.test_transformers_names import update
from tests.rollout.tiny import Weights, largest_difference

PROMPTS = [[5, 6, 7, 8], [100, 9, 10, 11, 12, 13], [40, 41]]


async def holds_what_was_sent(
    folder: Path, log: Path, weights: Weights, after: Any, left_out: str, missing: int, **options: Any
) -> None:
    """Start a server of `folder`, send it `weights`, and compare it with the model `after`, which has them.

    An update without the tensor `left_out`, which `missing` ranks hold, is refused. `options` are more of the server's.
    """
    sizes: dict[str, Any] = {"threads": 1, "max_total_tokens": 2048, "max_running_requests": 8}
    engine = await SglangEngine.open(ServerOptions(str(folder), log, **sizes, **options))
    try:
        await update(engine, weights)
        groups = await engine.generate(EngineRequest(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True), n=2))
        assert largest_difference(after, PROMPTS, groups) < 1e-5
        with pytest.raises(EngineError, match=rf"0 differ, {missing} missing.*nobody sent {left_out}@"):
            await update(engine, [pair for pair in weights if pair[0] != left_out], 2)
        assert engine.weight_version is None
    finally:
        await engine.stop()
