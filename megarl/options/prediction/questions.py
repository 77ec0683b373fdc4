"""Answers about the layer for multi-token prediction and drafts to questions that are asked of every config."""

from __future__ import annotations

from megarl.config.engine_kinds import declared_capabilities
from megarl.config.rollout import RolloutConfig
from megarl.config.schema import Config
from megarl.config.sections import PolicyConfig, TrainedRole
from megarl.options.prediction.section import SpeculativeConfig, drafts_of, mtp_of


def predicts(role: TrainedRole) -> bool:
    """Return whether the role has the layer, and trains it."""
    return isinstance(role, PolicyConfig) and mtp_of(role).train


def drafts(rollout: RolloutConfig) -> SpeculativeConfig | None:
    """The section on drafts; None: they are off."""
    return drafts_of(rollout) if drafts_of(rollout).algorithm != "none" else None


def syncs_prediction(config: Config) -> bool:
    """Return whether engines draft with the layer that the policy trains, and take its weights."""
    drafts_with_it = drafts_of(config.rollout).algorithm == "mtp" and declared_capabilities(config.rollout).updates_drafts
    return drafts_with_it and mtp_of(config.policy).train
