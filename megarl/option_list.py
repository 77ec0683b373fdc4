"""The options that this installation has, by name. Deleting an option is deleting its folder and its line here.

An option is a folder `megarl/options/<name>/`. What it adds to a run is in files of it with fixed names, the places; each place
is called from where docs/architecture.md says. Nothing outside `megarl/options` imports an option.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from megarl.errors import ConfigError

OPTIONS = (
    "pictures",
    "lora",
    "prediction",
    "routing_replay",
    "shared_prefixes",
    "few_bits",
    "linear_attention",
    "sparse_attention",
    "state_spaces",
    "compressed_attention",
    "gemma4",
    "shortcut_experts",
    "environments",
    "tools",
    "agents",
    "sandboxes",
    "lending",
    "elastic",
    "elastic_engines",
    "disaggregation",
    "host_cache",
    "fp8_cache",
    "transports",
    "distillation",
    "online_pairs",
    "ptx",
    "curriculum",
    "reward_model",
    "mirror",
    "telemetry",
    "serve",
)


@cache
def parts(place: str) -> tuple[ModuleType, ...]:
    """Import the file `<place>.py` of every option that has one, in the order of the list."""
    names = (f"megarl.options.{name}.{place}" for name in OPTIONS)
    return tuple(import_module(name) for name in names if find_spec(name) is not None)


def functions(place: str, name: str) -> tuple[Callable[..., Any], ...]:
    """The functions `name` in the files `<place>.py` of the options, of those that have it."""
    return tuple(getattr(module, name) for module in parts(place) if hasattr(module, name))


def part(option: str, place: str, field: str) -> ModuleType:
    """Import the file `<place>.py` of `option`, which the config asks for by `field`.

    Raises:
        ConfigError: this installation does not have the option.
    """
    if option not in OPTIONS:
        raise ConfigError(f"{field} needs the option {option}, which this installation does not have")
    return import_module(f"megarl.options.{option}.{place}")
