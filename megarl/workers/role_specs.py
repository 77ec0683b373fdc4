"""The models that a run may load, by role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config import AnyConfig
from megarl.config.sections import TrainedRole
from megarl.runs.training_side import REFERENCE


@dataclass(frozen=True)
class RoleSpec:
    """The model of a role: its Hugging Face folder, its head, and how it is trained (None: it only answers)."""

    path: str
    head: Literal["log_probs", "value"]
    trained: TrainedRole | None = None
    section: str = ""
    """Section of the config, where it is not the role's name."""


def role_specs(config: AnyConfig) -> dict[str, RoleSpec]:
    """The roles that a run may load: those of its config, and the reference, which a first step compares with."""
    specs = {
        role.name: RoleSpec(role.folder, "value" if role.value_head else "log_probs", role.trained, role.section)
        for role in config.roles
    }
    return {REFERENCE: RoleSpec(config.reference.path or config.model.path, "log_probs")} | specs
