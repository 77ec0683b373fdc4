"""What the layer for multi-token prediction takes on a rank of the last stage, besides what a layer of the decoder takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.models.packings import padded_vocab
from megarl.planning.activations import Precision, norm

if TYPE_CHECKING:
    from megarl.planning.roles import PlannedRole


def further_parameters(role: PlannedRole, stage: int) -> int:
    """Elements of the first stage's embedding that this stage has a copy of."""
    shape = role.shape
    if not shape.predicts or stage == 0 or stage < role.layout.pp - 1 or any(r.tied_copy for r in shape.weight_map.rules):
        return 0
    return padded_vocab(shape.vocab, role.layout.tp) // role.layout.tp * shape.hidden


def kept_behind_layers(role: PlannedRole, stage: int, precision: Precision) -> float:
    """Bytes per token: two norms and what the projection before the layer is given, the last norm, and the scored rows."""
    if not role.shape.predicts or stage != role.layout.pp - 1:
        return 0.0
    hidden = role.shape.hidden
    rows = 1 / role.layout.tp if role.layout.sequence_parallel else 1.0
    per_row = 3 * norm(hidden, precision) + 2 * hidden * precision.itemsize
    return rows * per_row + 2 * hidden * precision.itemsize
