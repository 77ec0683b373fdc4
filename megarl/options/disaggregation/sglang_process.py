"""Parts that SGLang's servers (0.5.23) lack for disaggregation on a CPU, installed in each of a server's processes.

SGLang registers the KV cache with NIXL as memory of a GPU; on a CPU the cache is main memory. And NIXL's thread, which moves
transfers on, looks for some without a pause; on a CPU that is a core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

PAUSE_US = 1000
"""Microseconds between two looks of NIXL's thread."""


def install(arguments: Sequence[str]) -> None:
    """Have NIXL take memory of the device for main memory, and pause, in a disaggregated server on a CPU."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1" or "--disaggregation-mode" not in arguments:
        return
    agent_class = import_module("nixl._api").nixl_agent
    bindings = import_module(agent_class.__module__).nixlBind
    make, make_agent = agent_class.__init__, bindings.nixlAgent

    def made(agent: Any, *arguments: Any, **keywords: Any) -> None:
        make(agent, *arguments, **keywords)
        agent.nixl_mems = {**agent.nixl_mems, "VRAM": agent.nixl_mems["DRAM"]}

    def made_with_pauses(name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_US
        return make_agent(name, config)

    agent_class.__init__, bindings.nixlAgent = made, made_with_pauses
