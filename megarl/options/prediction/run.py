"""The figures of speculative decoding in a step, and how the layer for multi-token prediction is trained."""

from __future__ import annotations

from typing import Any

from megarl.config import AnyConfig, Config
from megarl.data.batch import Batch
from megarl.experience.step_parts import StepPart
from megarl.megatron.options import PredictionOptions
from megarl.options.prediction.column import NAME, NO_DRAFTS, draft_figures
from megarl.options.prediction.section import mtp_of
from megarl.runs.training_side import POLICY, TrainingSide

SUMMED = frozenset({"mtp_loss", "mtp_accuracy"})
"""Metrics of the layer for multi-token prediction, means already."""


class DraftsPart(StepPart):
    """Says in `rollout/...` what drafts did for a step's responses."""

    def figures(self, roles: TrainingSide, batch: Batch) -> dict[str, float]:
        return draft_figures(sample.extra.get(NAME, NO_DRAFTS) for sample in batch.samples)


def take_part(config: Config, tokenizer: object) -> DraftsPart:
    """The part of every run: servers of others may draft, whatever the config says."""
    return DraftsPart()


def model_options(config: AnyConfig, role: str) -> dict[str, Any]:
    """Fields of a role's `ModelOptions`: how its layer for multi-token prediction is trained, if it is."""
    mtp = mtp_of(config.policy)
    if role != POLICY or not mtp.train:
        return {}
    return {"prediction": PredictionOptions(mtp.loss_weight, mtp.targets, synced=config.syncs_prediction)}
