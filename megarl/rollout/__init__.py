"""Rollout engines behind one class: SGLang servers, generation in one process, replay of recorded responses, or the user's own.

Importing this module does not load SGLang.
"""

from megarl.config.engine_kinds import EngineCapabilities
from megarl.rollout.engines.protocol import Engine, EnginePlace, EngineRequest, Generation, SamplingParams

__all__ = ["Engine", "EngineCapabilities", "EnginePlace", "EngineRequest", "Generation", "SamplingParams"]
