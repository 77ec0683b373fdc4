"""Part that SGLang's servers (0.5.23) lack for a cache in main memory on a CPU, installed in each of a server's processes.

SGLang waits for streams that copy; torch's stream of a CPU, which does at once whatever it is given, has no method for that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


def install(arguments: Sequence[str]) -> None:
    """Let streams of a CPU be waited for, in a server that has such a cache."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and "--enable-hierarchical-cache" in arguments:
        torch.cpu.Stream.synchronize = lambda stream: None  # type: ignore[attr-defined]
