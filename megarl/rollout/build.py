"""Makes an engine by the name that the config gives it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import EngineError, nearest
from megarl.models.registry import load_hf_config
from megarl.rollout.engine import Engine
from megarl.rollout.same_model import ModelFacts

KINDS = ("sglang", "embedded", "replay")


async def build_engine(kind: str, model_path: str | Path, options: Mapping[str, Any]) -> Engine:
    """Start an engine for the Hugging Face folder `model_path`.

    `options` are the fields of `ServerOptions` and `initial_version` (sglang; `log_file` is needed), or, for an SGLang server
    that runs already, `url`, `token`, `dtype` and `deadline_s`; the keyword arguments of `EmbeddedEngine` (embedded); or
    `replay_from`, a JSONL file of samples (replay).

    Raises:
        EngineError: an unknown kind or option, or the engine did not start.
    """
    options = dict(options)
    try:
        if kind == "sglang" and "url" in options:
            from megarl.rollout.external import ExternalEngine

            return await ExternalEngine.at(trainer=ModelFacts(load_hf_config(model_path), options.pop("dtype")), **options)
        if kind == "sglang":
            from megarl.rollout.sglang_engine import SglangEngine
            from megarl.rollout.sglang_server import ServerOptions

            initial_version = options.pop("initial_version", None)
            return await SglangEngine.start(ServerOptions(model_path=str(model_path), **options), initial_version)
        if kind == "embedded":
            from megarl.rollout.embedded import EmbeddedEngine

            return EmbeddedEngine(model_path, **options)
        if kind == "replay":
            from megarl.rollout.replay import ReplayEngine

            return ReplayEngine(**options)
    except TypeError as error:
        raise EngineError(f"options of the {kind} engine: {error}") from error
    raise EngineError(f"rollout.engine is {kind!r}; it may be {', '.join(KINDS)}{nearest(kind, KINDS)}")
