"""The models that a run may load, by role, and how they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config import AnyConfig
from megarl.config.sections import TrainedRole
from megarl.errors import ConfigError
from megarl.models.flops import FlopsModel
from megarl.option_list import parts


@dataclass(frozen=True)
class RoleSpec:
    """The model of a role: its Hugging Face folder, its head, and how it is trained (None: it only answers)."""

    path: str
    head: Literal["log_probs", "value"]
    trained: TrainedRole | None = None
    section: str = ""
    """Section of the config, where it is not the role's name."""


def role_specs(config: AnyConfig) -> dict[str, RoleSpec]:
    """The roles that a run may load: those of its config, which plans count, and no others."""
    return {
        role.name: RoleSpec(role.folder, "value" if role.value_head else "log_probs", role.trained, role.section)
        for role in config.roles
    }


def shares_prefixes(config: AnyConfig, layer_spec: str, flops: FlopsModel) -> bool:
    """`policy.share_prefix`; `auto`: where attention does it by itself, or an option has one that does, and it pays.

    Raises:
        ConfigError: it is asked for under layers that need the option, which is not there.
    """
    setting, choices = config.policy.share_prefix, parts("attention_choice")
    if layer_spec == "reference":
        return setting is not False
    if setting is True and not choices:
        lacks = "needs the option shared_prefixes, which this installation does not have"
        reason = f"under model.layer_spec = '{layer_spec}' {lacks}"
        raise ConfigError.of("policy.share_prefix", "true", reason, allowed="auto or false")
    return any(choice.pays(config, flops) for choice in choices) if setting == "auto" else setting
