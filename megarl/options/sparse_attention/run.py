"""Training of indexers in a run: what a role's model is told of it, and its figure in a step."""

from __future__ import annotations

from typing import Any

from megarl.config import AnyConfig, Config
from megarl.data.batch import Batch
from megarl.experience.step_parts import StepPart
from megarl.options.sparse_attention.rank_questions import taken_losses
from megarl.options.sparse_attention.section import indexer_of
from megarl.runs.training_side import POLICY, TrainingSide


class IndexerPart(StepPart):
    """Says in `indexer/divergence` how far indexers are from attention: the mean KL over layers, updates and tokens."""

    def figures(self, roles: TrainingSide, batch: Batch) -> dict[str, float]:
        by_rank = roles.ask(POLICY, taken_losses)
        layers = {layer for losses, _ in by_rank for layer in losses}
        passes = max(passes for _, passes in by_rank)
        total = sum(value for losses, _ in by_rank for value in losses.values())
        return {"indexer/divergence": total / (len(layers) * passes)} if layers else {}


def take_part(config: Config, tokenizer: object) -> IndexerPart | None:
    """The part of a run that trains indexers."""
    return IndexerPart() if indexer_of(config.policy).train != "none" else None


def model_options(config: AnyConfig, role: str) -> dict[str, Any]:
    """Fields of a role's `ModelOptions`: whether the policy's indexers are trained, and by which loss."""
    indexer = indexer_of(config.policy)
    if role != POLICY or indexer.train == "none":
        return {}
    sparse = indexer.train == "sparse"
    return {"variant": {"dsa_indexer_loss_coeff": indexer.loss_coeff, "dsa_indexer_use_sparse_loss": sparse}}
