"""The figures of speculative decoding in a step."""

from __future__ import annotations

from megarl.config import Config
from megarl.data.batch import Batch
from megarl.experience.step_parts import StepPart
from megarl.options.prediction.column import NAME, NO_DRAFTS, draft_figures
from megarl.runs.training_side import TrainingSide


class DraftsPart(StepPart):
    """Says in `rollout/...` what drafts did for a step's responses."""

    def figures(self, roles: TrainingSide, batch: Batch) -> dict[str, float]:
        return draft_figures(sample.extra.get(NAME, NO_DRAFTS) for sample in batch.samples)


def take_part(config: Config, tokenizer: object) -> DraftsPart:
    """The part of every run: servers of others may draft, whatever the config says."""
    return DraftsPart()
