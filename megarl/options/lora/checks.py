"""Checks of the sections `lora`: what adapters do not go with, and fields that have no effect without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.engine_kinds import EngineCapabilities
from megarl.config.schema import Config
from megarl.config.sections import ModelConfig, PolicyConfig, ReferenceConfig, TrainedRole
from megarl.config.supervised import SupervisedConfig
from megarl.errors import ConfigError
from megarl.options.lora.section import LoraConfig, lora_of_policy, section_of

_OF_FOLDER = ("rank", "alpha", "rslora", "targets", "exclude")
"""Fields that say what a PEFT folder says of its adapters."""


def check(config: Config) -> None:
    """Raise ConfigError for the first field that the adapters of policy or critic contradict."""
    _check_lora(config.model, {"policy": config.policy, "critic": config.critic}, config.reference, has_engines=True)


def check_supervised(config: SupervisedConfig) -> None:
    """`check` for a run that trains on given responses."""
    _check_lora(config.model, {"policy": config.policy}, config.reference, has_engines=False)


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Raise ConfigError where engines are to be sent adapters and cannot add them."""
    if not config.sends_adapters:
        return
    if not engine.adapters:
        reason = f"is not what engines of rollout.engine = '{config.rollout.engine}' take"
        reason += ", whose weights are a folder" if engine.weights == "folder" else ""
        raise ConfigError.of("policy.lora.sync", "adapters", reason, allowed="'merged'")
    if (served := config.rollout.servers.model_path) is not None:
        reason = f"are added to the weights of model.path, and rollout.servers.model_path is {served}"
        raise ConfigError.of("policy.lora.sync", "adapters", reason, allowed="'merged'")
    if config.rollout.delta_every:
        reason = "tells what has changed of weights, and policy.lora.sync is 'adapters'"
        raise ConfigError.of("rollout.delta_every", config.rollout.delta_every, reason, allowed="0")


def _check_lora(
    model: ModelConfig, trained: Mapping[str, TrainedRole], reference: ReferenceConfig, *, has_engines: bool
) -> None:
    """Raise ConfigError for the first field that a role's adapters contradict; `trained`: by name, the roles that are."""
    for name, role in trained.items():
        _check_section(f"{name}.lora", section_of(role))
        if role.has_adapters:
            _check_role(name, role, model)
            if (
                has_engines
                and isinstance(role, PolicyConfig)
                and role.experts.bias_update_rate
                and lora_of_policy(role).sync == "adapters"
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
    if role.megatron.get("moe_shared_expert_overlap") and role.layout.sequence_parallel:
        reason = "gathers the tokens of shared experts itself, which adapters beside these would gather again"
        refuse(f"{name}.megatron.moe_shared_expert_overlap", True, reason, "false")
    if role.predicts:
        refuse(f"{name}.mtp.train", True, "trains a layer that has no adapters", "false")
    if model.int4_experts:
        refuse("model.int4_experts", model.int4_experts, "rounds weights to what engines serve, but not their adapters", "0")
    if model.fp8_param:
        reason = "makes weights of the optimizer's copies, and weights that are not trained have none"
        refuse("model.fp8_param", True, reason, "false")


def _stated(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
