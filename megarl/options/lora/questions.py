"""Answers of adapters to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.sections import PolicyConfig, TrainedRole
from megarl.options.lora.section import lora_of_policy, section_of


def has_adapters(role: TrainedRole) -> bool:
    """Return whether the role trains adapters in place of its weights."""
    return section_of(role).on


def sends_adapters(policy: PolicyConfig) -> bool:
    """Return whether weight updates are adapters alone."""
    lora = lora_of_policy(policy)
    return lora.on and lora.sync == "adapters"


def begins_with(policy: PolicyConfig) -> str | None:
    """The field by which the policy starts with other weights than those of `model.path`."""
    return "policy.lora.adapter" if section_of(policy).adapter is not None else None
