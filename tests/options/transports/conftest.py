"""An SGLang server on a tiny model, as the tests of engines have."""

from __future__ import annotations

from tests.rollout.conftest import _one_thread, sglang_engine, tiny_path

__all__ = ["_one_thread", "sglang_engine", "tiny_path"]
