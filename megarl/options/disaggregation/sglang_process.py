"""Part that SGLang's servers (0.5.23) lack for disaggregation on a CPU, installed in each of a server's processes.

SGLang registers the KV cache with NIXL as memory of a GPU. On a CPU the cache is main memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any


def install(arguments: Sequence[str]) -> None:
    """Have NIXL take memory of the device for main memory, in a server on a CPU that is disaggregated."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or "--disaggregation-mode" not in arguments:
        return
    agent_class = import_module("nixl._api").nixl_agent
    make = agent_class.__init__

    def made(agent: Any, *arguments: Any, **keywords: Any) -> None:
        make(agent, *arguments, **keywords)
        agent.nixl_mems = {**agent.nixl_mems, "VRAM": agent.nixl_mems["DRAM"]}

    agent_class.__init__ = made
