"""The arguments of the SGLang servers (0.5.23) behind `megarl serve`: room for adapters by name, and seeds of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megarl.options.serve.sglang_process import SERVED_NAME

SLOTS = 8
"""Adapters that the requests of one pass may have, at most; others wait for a later pass. Each slot takes the memory of an
adapter of the highest rank."""
OUTPUT_LAYER = "lm_head"


def seed_arguments() -> dict[str, Any]:
    """The arguments of every server; SGLang's sampling kernels other than PyTorch's take no seeds."""
    return {"served_model_name": SERVED_NAME, "sampling_backend": "pytorch"}


def adapter_room(modules: Iterable[str], max_rank: int, live_models: int) -> dict[str, Any]:
    """Further arguments of one that loads adapters of up to `max_rank` by name, beside `modules` and the output layer."""
    return {
        "enable_lora": True,
        "lora_target_modules": sorted({*modules, OUTPUT_LAYER}),
        "max_lora_rank": max_rank,
        "max_loras_per_batch": _slots(live_models),
        "max_loaded_loras": loaded_adapters(live_models),
    }


def loaded_adapters(live_models: int) -> int:
    """Adapters that a server keeps in its machine's memory; beyond them the least recently used one is read again."""
    return max(_slots(live_models), live_models)


def _slots(live_models: int) -> int:
    """Adapters of one pass, and a place for requests without any."""
    return min(SLOTS, live_models) + 1
