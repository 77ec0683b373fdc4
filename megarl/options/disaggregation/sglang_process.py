"""Parts that SGLang's servers (0.5.23) lack for disaggregation on a CPU, installed in each of a server's processes.

SGLang registers the KV cache with NIXL as memory of a GPU; on a CPU the cache is main memory. And NIXL's thread, which moves
transfers on, looks for some all the time; on a CPU that is a core, and whoever waits for a transfer moves it on as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any


def install(arguments: Sequence[str]) -> None:
    """Have NIXL take memory of the device for main memory, and use no thread, in a disaggregated server on a CPU."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or "--disaggregation-mode" not in arguments:
        return
    agent_class = import_module("nixl._api").nixl_agent
    make = agent_class.__init__

    def made(agent: Any, name: str, config: Any = None, *more: Any) -> None:
        if config is not None:
            config.enable_pthread = False
        make(agent, name, config, *more)
        agent.nixl_mems = {**agent.nixl_mems, "VRAM": agent.nixl_mems["DRAM"]}

    agent_class.__init__ = made
