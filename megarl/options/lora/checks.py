"""Checks of the sections `lora`: what adapters do not go with, and fields that have no effect without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.sections import ModelConfig, PolicyConfig, ReferenceConfig, TrainedRole
from megarl.errors import ConfigError
from megarl.options.lora.config import LoraConfig

_OF_FOLDER = ("rank", "alpha", "rslora", "targets", "exclude")
"""Fields that say what a PEFT folder says of its adapters."""


def check_lora(
    model: ModelConfig, trained: Mapping[str, TrainedRole], reference: ReferenceConfig, *, has_engines: bool
) -> None:
    """Raise ConfigError for the first field that a role's adapters contradict; `trained`: by name, the roles that are."""
    for name, role in trained.items():
        _check_section(f"{name}.lora", role.lora)
        if role.lora.on:
            _check_role(name, role, model)
            if (
                has_engines
                and isinstance(role, PolicyConfig)
                and role.experts.bias_update_rate
                and role.lora.sync == "adapters"
            ):
                reason = "moves biases of routers, which engines would not be sent"
                allowed = "0 with policy.lora, or policy.lora.sync 'merged'"
                raise ConfigError.of("policy.experts.bias_update_rate", role.experts.bias_update_rate, reason, allowed=allowed)
            if name == "policy" and reference.reset_every:
                reason = "moves a second model, and the reference of a policy with adapters is the policy without them"
                raise ConfigError.of("reference.reset_every", reference.reset_every, reason, allowed="0 with policy.lora")


def _check_section(field: str, lora: LoraConfig) -> None:
    changed = {name: value for name in _OF_FOLDER if (value := getattr(lora, name)) != LoraConfig.model_fields[name].default}
    if lora.adapter is not None:
        for name, value in changed.items():
            default = _stated(LoraConfig.model_fields[name].default)
            raise ConfigError.of(
                f"{field}.{name}",
                _stated(value),
                f"the folder in {field}.adapter says for itself",
                allowed=f"left at {default}",
            )
    elif not lora.rank and (chosen := changed.keys() & {"targets", "exclude"}):
        name, value = max(chosen), changed[max(chosen)]
        remedy = f"set {field}.rank, or remove {field}.{name}"
        raise ConfigError.needs(f"{field}.{name} = {_stated(value)}", "adapters, which a rank of 0 leaves out", remedy)


def _check_role(name: str, role: TrainedRole, model: ModelConfig) -> None:
    def refuse(field: str, value: Any, reason: str, allowed: str) -> None:
        raise ConfigError.of(field, value, reason, allowed=f"{allowed} with {name}.lora")

    if role.freeze:
        refuse(f"{name}.freeze", list(role.freeze), "names weights, of which adapters leave all as they are", "empty")
    if role.optimizer.name == "muon":
        refuse(f"{name}.optimizer.name", "muon", "is for whole matrices, not for the two factors of an adapter", "'adamw'")
    if role.optimizer.groups:
        refuse(f"{name}.optimizer.groups", "given", "chooses among weights, none of which is trained", "empty")
    if role.predicts:
        refuse(f"{name}.mtp.train", True, "trains a layer that has no adapters", "false")
    if model.int4_experts:
        refuse("model.int4_experts", model.int4_experts, "rounds weights to what engines serve, but not their adapters", "0")
    if model.fp8_param:
        reason = "makes weights of the optimizer's copies, and weights that are not trained have none"
        refuse("model.fp8_param", True, reason, "false")


def _stated(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
