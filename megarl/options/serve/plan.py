"""Memory that the many models of a server take on ranks and engines, for `megarl plan`. Without torch."""

from __future__ import annotations

from megarl.config import AnyConfig
from megarl.models.adapters import AdapterSpec, adapters_of
from megarl.models.registry import load_hf_config
from megarl.options.serve.section import serve_of

SLOTS = 9
"""Adapters that an engine has on its GPU at most: of eight models in one pass, and those of requests without any."""


def kept_models(config: AnyConfig) -> int:
    """Models whose adapters, gradients and moments ranks keep in main memory; 0 of any other run."""
    serve = serve_of(config) if config.sampling is not None else None
    return 0 if serve is None or serve.full_weights else serve.live_models


def engine_places(config: AnyConfig) -> tuple[AdapterSpec | None, int, int] | None:
    """The adapters that engines of a server add, places for them on a GPU, and models in main memory; None: it is no server."""
    models = kept_models(config)
    if not models:
        return None
    adapters = adapters_of(config.policy, load_hf_config(config.model.path), "policy.lora")
    return adapters, min(SLOTS, models + 1), models
