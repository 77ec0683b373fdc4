"""Training of indexers in a run, and replay of their choices: what a role's model is told, and figures in a step."""

from __future__ import annotations

from typing import Any

from megarl.config import AnyConfig, Config
from megarl.data.batch import Batch
from megarl.experience.step_parts import StepPart
from megarl.options.sparse_attention.rank_questions import ChoiceCounts, taken_losses, taken_replays
from megarl.options.sparse_attention.section import IndexerConfig, indexer_of
from megarl.runs.training_side import POLICY, TrainingSide


class IndexerPart(StepPart):
    """Says in `indexer/divergence` how far indexers are from attention, the mean KL over layers, updates and tokens, and in
    `indexer/missing` and `indexer/differing` what was replayed."""

    def __init__(self, indexer: IndexerConfig) -> None:
        self.indexer = indexer

    def figures(self, roles: TrainingSide, batch: Batch) -> dict[str, float]:
        trained = self._of_training(roles) if self.indexer.train != "none" else {}
        return trained | (self._of_replay(roles) if self.indexer.replay != "none" else {})

    def _of_replay(self, roles: TrainingSide) -> dict[str, float]:
        """Counts of queries that see more keys than they may choose."""
        counts = ChoiceCounts(*map(sum, zip(*roles.ask(POLICY, taken_replays), strict=True)))
        return {
            "indexer/missing": 1.0 - counts.known / max(counts.queries, 1) if counts.queries else 0.0,
            "indexer/differing": counts.differing / max(counts.keys, 1),
        }

    def _of_training(self, roles: TrainingSide) -> dict[str, float]:
        by_rank = roles.ask(POLICY, taken_losses)
        layers = {layer for losses, _ in by_rank for layer in losses}
        passes = max(passes for _, passes in by_rank)
        total = sum(value for losses, _ in by_rank for value in losses.values())
        return {"indexer/divergence": total / (len(layers) * passes)} if layers else {}


def take_part(config: Config, tokenizer: object) -> IndexerPart | None:
    """The part of a run that trains indexers, or replays their choices."""
    indexer = indexer_of(config.policy)
    return IndexerPart(indexer) if (indexer.train, indexer.replay) != ("none", "none") else None


def model_options(config: AnyConfig, role: str) -> dict[str, Any]:
    """Fields of a role's `ModelOptions`: whether the policy's indexers are trained, and by which loss."""
    indexer = indexer_of(config.policy)
    if role != POLICY or indexer.train == "none":
        return {}
    sparse = indexer.train == "sparse"
    return {"variant": {"dsa_indexer_loss_coeff": indexer.loss_coeff, "dsa_indexer_use_sparse_loss": sparse}}
