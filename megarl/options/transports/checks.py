"""Checks of `rollout.weight_transport: rdma`: of the config when it is read, and of this machine when a run starts."""

from __future__ import annotations

from importlib.util import find_spec

from megarl.config.engine_kinds import EngineCapabilities
from megarl.config.schema import Config
from megarl.errors import ConfigError

_CHOSEN = "rollout.weight_transport = 'rdma'"


def check_rdma(config: Config, engine: EngineCapabilities) -> None:
    """Raise ConfigError where engines cannot read weights from training ranks."""
    if engine.weights != "slices":
        remedy = "set rollout.engine, or choose another rollout.weight_transport"
        raise ConfigError.needs(_CHOSEN, "rollout.engine = 'sglang'", remedy)
    if config.resources.placement == "colocated":
        reason = "is for engines with GPUs of their own, but resources.placement is 'colocated'"
        raise ConfigError.of("rollout.weight_transport", "rdma", reason, allowed="'shared_memory'")


def check_nixl() -> None:
    """Raise ConfigError where NIXL is not installed."""
    if find_spec("nixl") is None:
        remedy = "pip install 'megarl[rdma]', or choose another rollout.weight_transport"
        raise ConfigError.needs(_CHOSEN, "NIXL, which is not installed", remedy)
