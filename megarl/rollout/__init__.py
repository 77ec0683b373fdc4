"""Rollout engines behind one protocol: SGLang servers, generation in this process, and replay of recorded responses.

The only room that knows SGLang. `build_engine` makes an engine by name; importing this module does not load SGLang.
"""

from megarl.rollout.build import build_engine
from megarl.rollout.engine import Bucket, Engine, Generation, Progress, SamplingParams

__all__ = ["Bucket", "Engine", "Generation", "Progress", "SamplingParams", "build_engine"]
